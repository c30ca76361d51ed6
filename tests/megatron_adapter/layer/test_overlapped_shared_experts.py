"""Shared experts compute between the start of an exchange and the wait for it, forward and backward.

The results are compared by ``test_parm_layer.py`` and by whole trainings.
"""

from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch

from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from .small_config import moe_config

FORWARD = [
    *("depart", "fc1", "wait", "arrive"),
    "experts",
    *("depart", "fc2", "wait", "arrive"),
]
BACKWARD = [
    *("depart back", "fc2 back", "wait", "arrive back"),
    "experts back",
    *("depart back", "fc1 back", "wait", "arrive back"),
]


def test_both_halves_are_beside_the_messages() -> None:
    for journal in run_megatron_ranks(_journal, 2, ep=2):
        # One module computes several experts in turn.
        assert [entry for entry, _ in groupby(journal)] == FORWARD + BACKWARD


def _journal(rank: int, world_size: int) -> list[str]:
    """What a layer of experts did in one forward and backward pass, in order."""
    import megatron_fssdp
    from megatron_fssdp.collectives.rows import two_node_exchange as nodes

    config = moe_config(
        world_size,
        8,
        4,
        moe_shared_expert_intermediate_size=12,
        moe_shared_expert_overlap=True,
        moe_shared_expert_gate=True,
    )
    spec = megatron_fssdp.get_moe_module_spec(use_te=False, num_experts=4, strategy="ep")
    layer = spec(config=config, pg_collection=None)
    layer.set_layer_number(1)
    journal: list[str] = []

    def noting(module: torch.nn.Module, name: str) -> None:
        module.register_forward_hook(lambda *_: journal.append(name))
        module.register_full_backward_hook(lambda *_: journal.append(f"{name} back"))

    noting(layer.shared_experts.linear_fc1, "fc1")
    noting(layer.shared_experts.linear_fc2, "fc2")
    noting(layer.experts.local_experts[0].linear_fc1, "experts")
    take = nodes.TwoNodeExchange._take_arrival

    def noted(original: Any, before: str | None, after: str | None) -> Any:
        def call(*args: Any) -> Any:
            journal.extend([before] if before else [])
            result = original(*args)
            journal.extend([after] if after else [])
            return result

        return call

    def noted_static(original: Any, after: str) -> Any:
        return staticmethod(noted(original, None, after))

    with (
        patch.object(nodes.TwoNodeExchange, "_take_arrival", noted(take, "wait", None)),
        patch.object(nodes.TwoNodeExchange, "depart", noted(nodes.TwoNodeExchange.depart, None, "depart")),
        patch.object(nodes.TwoNodeExchange, "arrive", noted(nodes.TwoNodeExchange.arrive, None, "arrive")),
        patch.object(nodes._Arrive, "backward", noted_static(nodes._Arrive.backward, "depart back")),
        patch.object(nodes._Depart, "backward", noted_static(nodes._Depart.backward, "arrive back")),
    ):
        hidden = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        layer(hidden)[0].sum().backward()
    return journal
