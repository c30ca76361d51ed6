from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.routing import topology_aware_gate
from megatron_fssdp.megatron_adapter.routing.topology_aware_gate import TopologyAwareTopK, install_gate
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.records.metrics import read_metrics
from tests.support.training_preload import on_ranks

from ..layer.small_config import moe_config
from ..training_run import relative_difference, train


def drawn(seed):
    """Scores of 30 tokens for 8 experts, of which at least 3 are near."""
    generator = torch.Generator().manual_seed(seed)
    is_near_E = torch.zeros(8, dtype=torch.bool)
    is_near_E[torch.randperm(8, generator=generator)[: 3 + seed % 6]] = True
    return torch.rand(30, 8, generator=generator), is_near_E


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 40), st.booleans())
def test_the_allowed_number_of_tokens_leaves_and_no_expert_is_chosen_twice(
    seed, top_k, most_leaving, few_values
):
    fit_TE, is_near_E = drawn(seed)
    if few_values:
        fit_TE = (4 * fit_TE).round()
    selected_TK = topology_aware_gate.select_experts(fit_TE, top_k, is_near_E, most_leaving)
    is_taken_TE = torch.zeros_like(fit_TE, dtype=torch.bool)
    for choice in range(top_k):
        selected_T = selected_TK[:, choice]
        assert not is_taken_TE.gather(1, selected_T[:, None]).any(), "an expert was chosen twice"
        open_TE = fit_TE.masked_fill(is_taken_TE, -1.0)
        best_T = open_TE.amax(dim=1)
        fit_T = fit_TE.gather(1, selected_T[:, None])[:, 0]
        # Ties between near and far experts go to the lower number, so this test does the same.
        wants_T = ~is_near_E[(open_TE == best_T[:, None]).int().argmax(dim=1)]
        leaves_T = ~is_near_E[selected_T]
        assert leaves_T.sum() == min(most_leaving, int(wants_T.sum()))
        stays_T = wants_T & ~leaves_T
        if stays_T.any() and leaves_T.any():
            assert best_T[leaves_T].min() >= best_T[stays_T].max(), "a token with a lower score left"
        nearest_T = open_TE.masked_fill(~is_near_E, -1.0).amax(dim=1)
        assert (fit_T == torch.where(stays_T, nearest_T, best_T)).all()
        is_taken_TE[torch.arange(30), selected_T] = True


TWO_NODES = Topology.uniform(4, 2)
OWNERS = np.array([0, 0, 1, 1, 2, 2, 3, 3])


def test_logits_are_compared_after_a_softmax():
    """The second token has the higher logit but the lower probability, so the first one can leave."""
    logits = torch.tensor([[0.0, 0, 0, 0, 9, 0, 0, 0], [19.0, 0, 0, 0, 20, 0, 0, 0]])
    for is_logits, wanted in ((True, [4, 0]), (False, [0, 4])):
        choice = TopologyAwareTopK(OWNERS, 0, TWO_NODES, 0.5, scores_are_logits=is_logits)
        scores, indices = choice.get_replay_topk(logits, 1, None, None, None)
        assert indices[:, 0].tolist() == wanted
        assert torch.equal(scores, logits.gather(1, indices))


def test_nodes_with_too_few_experts_are_refused():
    config = SimpleNamespace(moe_router_topk=5)
    router = SimpleNamespace(router_replay=None, config=config)
    with pytest.raises(ConfigurationError, match=r"4 experts in a node, wanted at least 5"):
        install_gate(router, TopologyAwareTopK(OWNERS, 0, TWO_NODES, 0.1))


SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
TOP1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
ROUTERS = [{}, TOP1, {**SIGMOID, "moe_router_dtype": "fp32"}]


@pytest.mark.parametrize("options", ROUTERS)
@on_ranks(1)
def test_only_the_selection_of_experts_changes(options):
    balancing = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    config = moe_config(1, 16, 8, **balancing, **options)
    router = TopKRouter(config, pg_collection=get_default_pg_collection())
    router.set_layer_number(1)
    inputs = torch.randn(40, 1, 16, generator=torch.Generator().manual_seed(3))

    def routed():
        router.zero_grad()
        probs, routing_map = router(inputs)
        (probs * 0).sum().backward()  # the auxiliary loss alone
        return probs.detach(), routing_map, router.weight.grad.clone()

    probs, stock_map, stock_gradient = routed()
    install_gate(router, TopologyAwareTopK(OWNERS, 0, TWO_NODES, 1.0))
    router.set_layer_number(1)
    assert all(map(torch.equal, routed(), (probs, stock_map)))  # All may leave.

    install_gate(router, TopologyAwareTopK(OWNERS, 0, TWO_NODES, 0.1))
    probs, routing_map, gradient = routed()
    assert (routing_map.sum(dim=1) == config.moe_router_topk).all()
    assert routing_map[:, 4:].sum() <= 4 * config.moe_router_topk < stock_map[:, 4:].sum()
    assert ((probs > 0) == routing_map).all()
    assert gradient.abs().max() > 0
    # Megatron's auxiliary loss uses the gate's own scores, which are unchanged.
    torch.testing.assert_close(gradient, stock_gradient)


@pytest.mark.slow
def test_training_keeps_tokens_in_their_node_and_strategies_agree(text_data, tmp_path):
    gate = "nodes=2 router=topology_aware leaving_share=0.25"
    losses = {}
    for name, strategy in (
        ("stock", "ep nodes=2"),
        ("ep", f"ep {gate}"),
        ("fastermoe", f"fastermoe {gate} slots=2"),
    ):
        recorded = f"{strategy} record_dir={tmp_path / name}"
        losses[name] = train(4, "{EP4} --train-iters 5 {RECOMPUTE}", text_data, strategy=recorded).losses
    assert relative_difference(losses["ep"], losses["fastermoe"]) <= 1e-5
    assert relative_difference(losses["ep"], losses["stock"]) > 1e-4
    counts_ILDE = read_loads(tmp_path / "ep").counts_ILDE
    away = counts_ILDE[:, :, :2, 4:].sum() + counts_ILDE[:, :, 2:, :4].sum()
    # A quarter of each rank's tokens, for each of two choices.
    assert 0 < away <= 0.25 * counts_ILDE.sum()
    layers = [layer for entry in read_metrics(tmp_path / "ep") for layer in entry.layers]
    assert sum(layer.cross_node_tokens for layer in layers) == away
