"""Sums of the deduplicated exchange, and what it refuses; layers with it are compared with Megatron's own."""

import pytest
import torch

from megatron_fssdp.dispatchers.deduplicated import DeduplicatedTokenDispatcher, _Copies
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.testing import run_megatron_ranks

from ..megatron_adapter.layer.small_config import moe_config


def test_rows_of_bf16_are_summed_in_fp32() -> None:
    copies = _Copies(torch.zeros(257, dtype=torch.int64), 2)
    rows = torch.ones(257, 1, dtype=torch.bfloat16)
    rows[0] = 256.0
    assert copies.sum(rows).tolist() == [[512.0], [0.0]]
    token = torch.ones(2, 1, dtype=torch.bfloat16, requires_grad=True)
    copies.spread(token).backward(rows)
    assert token.grad is not None
    assert token.grad.tolist() == [[512.0], [0.0]]


def test_settings_that_do_not_fit_are_refused() -> None:
    for messages in run_megatron_ranks(_refusals, 2, ep=2):
        assert "the topology has 3 devices: wanted 2" in messages[0]
        assert "moe_preprocess" in messages[1]
        assert "more slots than their rows have room for: wanted at most 2" in messages[2]


def _refusals(rank: int, world_size: int) -> list[str]:
    from megatron.core.transformer.enums import CudaGraphModule
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    graph = {"cuda_graph_impl": "local", "cuda_graph_modules": [CudaGraphModule.moe_preprocess]}
    messages = []
    for nodes, settings in (((0, 0, 1), {}), ((0, 1), graph), ((0, 1), {})):
        config = moe_config(2, 8, 4)
        vars(config).update(settings)
        with pytest.raises((ValueError, RuntimeError)) as error:  # noqa: PT012
            dispatcher = DeduplicatedTokenDispatcher(
                2, [2 * rank, 2 * rank + 1], config, get_default_pg_collection(), topology=Topology(nodes)
            )
            map_of_all = torch.ones(3, 4, dtype=torch.bool)
            dispatcher.dispatch_preprocess(torch.ones(3, 1, 8), map_of_all, torch.ones(3, 4))
        messages.append(str(error.value))
    return messages
