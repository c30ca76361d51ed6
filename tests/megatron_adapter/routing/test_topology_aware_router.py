"""FasterMoE's gate in Megatron's router changes only the selection of experts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.routing.topology_aware_gate import (
    TopologyAwareTopK,
    install_gate,
)
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.records.metrics_file import read_metrics
from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from ..training_run import relative_difference, train

TWO_NODES = Topology.uniform(4, 2)
OWNERS = np.array([0, 0, 1, 1, 2, 2, 3, 3])


def test_logits_are_compared_after_a_softmax() -> None:
    """The second token has the higher logit but the lower probability, so the first one can leave."""
    logits = torch.tensor([[0.0, 0, 0, 0, 9, 0, 0, 0], [19.0, 0, 0, 0, 20, 0, 0, 0]])
    for is_logits, wanted in ((True, [4, 0]), (False, [0, 4])):
        choice = TopologyAwareTopK(lambda: OWNERS, 0, TWO_NODES, 0.5, scores_are_logits=is_logits)
        scores, indices = choice.get_replay_topk(logits, 1, None, None, None)
        assert indices[:, 0].tolist() == wanted
        assert torch.equal(scores, logits.gather(1, indices))


def test_the_router_follows_moved_owners() -> None:
    owners = OWNERS.copy()
    choice = TopologyAwareTopK(lambda: owners, 0, TWO_NODES, 0.0, scores_are_logits=False)
    scores = torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.9, 0.0, 0.0, 0.0]])
    assert choice.get_replay_topk(scores, 1)[1].tolist() == [[3]]
    owners[[3, 4]] = owners[[4, 3]]
    assert choice.get_replay_topk(scores, 1)[1].tolist() == [[4]]


def test_nodes_with_too_few_experts_and_foreign_routers_are_refused() -> None:
    config = SimpleNamespace(moe_router_topk=5)
    router = SimpleNamespace(router_replay=None, config=config)
    with pytest.raises(ConfigurationError, match=r"4 experts in a node, wanted at least 5"):
        install_gate(router, TopologyAwareTopK(lambda: OWNERS, 0, TWO_NODES, 0.1))
    with pytest.raises(ConfigurationError, match="without the attribute router_replay"):
        install_gate(SimpleNamespace(config=config), TopologyAwareTopK(lambda: OWNERS, 0, TWO_NODES, 0.1))


SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
ROUTERS: list[dict[str, Any]] = [
    {},
    {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    {**SIGMOID, "moe_router_dtype": "fp32"},
]


def test_only_the_selection_of_experts_changes() -> None:
    run_megatron_ranks(_check_routers, 1)


def _check_routers(rank: int, world_size: int) -> None:
    for options in ROUTERS:
        _check_router(options)


def _check_router(options: dict[str, Any]) -> None:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes: Any = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_moe_experts": 8}
    balancing = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    config = TransformerConfig(**sizes, **balancing, use_cpu_initialization=True, **options)
    router = TopKRouter(config, pg_collection=get_default_pg_collection())
    router.set_layer_number(1)
    inputs = torch.randn(40, 1, 16, generator=torch.Generator().manual_seed(3))

    def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        router.zero_grad()
        probs, routing_map = router(inputs)
        (probs * 0).sum().backward()  # the auxiliary loss alone
        return probs.detach(), routing_map, router.weight.grad.clone()

    probs, stock_map, stock_gradient = routed()
    install_gate(router, TopologyAwareTopK(lambda: OWNERS, 0, TWO_NODES, 1.0))
    router.set_layer_number(1)
    all_may_leave = routed()
    assert torch.equal(all_may_leave[0], probs)
    assert torch.equal(all_may_leave[1], stock_map)

    install_gate(router, TopologyAwareTopK(lambda: OWNERS, 0, TWO_NODES, 0.1))
    probs, routing_map, gradient = routed()
    assert (routing_map.sum(dim=1) == config.moe_router_topk).all()
    assert routing_map[:, 4:].sum() <= 4 * config.moe_router_topk < stock_map[:, 4:].sum()
    assert ((probs > 0) == routing_map).all()
    assert gradient.abs().max() > 0
    # Megatron's auxiliary loss uses the gate's own scores, which are unchanged.
    torch.testing.assert_close(gradient, stock_gradient)

    install_gate(router, TopologyAwareTopK(lambda: OWNERS, 0, TWO_NODES, 0.1, "one"))
    _, routing_map, _ = routed()
    assert (routing_map.sum(dim=1) == config.moe_router_topk).all()
    assert routing_map[:, 4:].sum() == 4, "with one choice each, 4 of 40 tokens leave"


@pytest.mark.slow
def test_training_keeps_tokens_in_their_node_and_strategies_agree(text_data: Path, tmp_path: Path) -> None:
    gate = "nodes=2 router=topology_aware leaving_share=0.25"
    losses = {}
    for name, strategy in (
        ("stock", "ep nodes=2"),
        ("ep", f"ep {gate}"),
        ("fssdp", f"fssdp {gate} reshard_interval=0 slots=2 overlap_degree=3"),
    ):
        recorded = f"{strategy} record_dir={tmp_path / name}"
        losses[name] = train(4, "{EP4} --train-iters 5 {RECOMPUTE}", text_data, strategy=recorded).losses
    assert relative_difference(losses["ep"], losses["fssdp"]) <= 1e-5
    assert relative_difference(losses["ep"], losses["stock"]) > 1e-4
    counts_ILDE = read_loads(tmp_path / "ep").counts_ILDE
    away = counts_ILDE[:, :, :2, 4:].sum() + counts_ILDE[:, :, 2:, :4].sum()
    # A quarter of each rank's tokens, for each of two choices.
    assert 0 < away <= 0.25 * counts_ILDE.sum()
    layers = [layer for entry in read_metrics(tmp_path / "ep") for layer in entry.layers]
    assert sum(layer.cross_node_tokens for layer in layers) == away
