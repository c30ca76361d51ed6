"""A layer runs with a CUDA graph of its router as Megatron runs its own layer.

There is no graph on a CPU. Megatron's flags and its store of captured tensors are set by hand, in the way in
which Megatron's transformer layer sets them at the capture and at every replay.
"""

from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.enums import CudaGraphModule

from tests.support.training_preload import on_ranks

from .small_config import build_layer, moe_config

EXPERTS, HIDDEN, TOKENS = 4, 8, 16
REPLICAS = {"slots": 1, "overlap_degree": 2, "reshard_interval": 0}


def _captured_layer():
    """A layer whose preprocessing is in a graph, and an input."""
    config = moe_config(2, HIDDEN, EXPERTS)
    config.cuda_graph_impl = "transformer_engine"
    config.cuda_graph_modules = [CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess]
    layer = build_layer(config, "fssdp", REPLICAS)
    layer.slot_layer.counts._measures_spread = True  # as with records
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    hidden[..., 0] += 2
    cuda_graphs._set_capture_start()
    layer(hidden)
    cuda_graphs._set_capture_end()
    return layer, hidden


def _replay(layer, hidden):
    """Give a layer what a replay computes: the same operations on the same tensors."""
    probs, routing_map = layer.router(hidden)
    slot_map, slot_probs = layer.slot_layer.remap(routing_map, probs)
    rows, row_probs = layer.token_dispatcher.dispatch_preprocess(hidden, slot_map, slot_probs)
    layer.cudagraph_tensor_store.set(hidden_states=rows, probs=row_probs)
    return slot_map


@on_ranks(2, ep=2)
def test_a_graph_of_preprocessing_counts_each_iteration_anew():
    """Replay it twice in each of two iterations."""
    layer, hidden = _captured_layer()
    slots, clock = layer.slot_layer, layer.slot_layer.clock
    slots.reset()
    sums = slots.counts._rows_W[0], slots.counts._spread.sums
    addresses = set()
    for _ in range(2):
        clock.driven, clock.trains, clock.num_micro_batches = True, True, 2
        for _ in range(2):
            # Nothing of the plugin's Python runs in a replay but `prepare`, so the sums are changed by hand.
            slots.is_counted = False
            slots.passes.plan_iteration()
            slots.passes.use(slots.passes.shared)
            slot_map = _replay(layer, hidden)
            sums[0].add_(slot_map.any(dim=1).sum())
            sums[1].add_(len(slot_map))
            layer(hidden)[0].sum().backward()
            layer.cudagraph_tensor_store.clear()
        shared = slots.counts.to_share(slots.passes.shared)
        addresses.add((slots.counts._rows_W[0].data_ptr(), slots.counts._spread.sums.data_ptr()))
        assert shared[0] == shared[-1] == 2 * TOKENS
        slots.gradients.finish()
        slots.end_iteration()
    assert len(addresses) == 1


@on_ranks(2, ep=2)
def test_a_graph_of_preprocessing_keeps_its_table_while_plans_change():
    """Capture with the slots of the first plan; replay with those of later plans, as the graph would."""
    layer, hidden = _captured_layer()
    slots, clock = layer.slot_layer, layer.slot_layer.clock
    dispatcher, table = layer.token_dispatcher, _table_of(slots)
    assert [*dispatcher.valid_cudagraph_attrs]
    plans = set()
    for hot in range(3):
        clock.driven, clock.trains, clock.num_micro_batches = True, True, 1
        slots.history.append(1 + 99 * np.eye(EXPERTS, dtype=np.int64)[[hot] * 2])
        wanted, _ = layer(hidden)
        plans.add(slots.passes.plan.digest())
        assert layer.token_dispatcher is dispatcher
        assert _table_of(slots) == table
        _replay(layer, hidden)
        with mock.patch.object(layer.router, "forward", side_effect=AssertionError("the router ran")):
            got, _ = layer(hidden)
        layer.cudagraph_tensor_store.clear()
        assert torch.equal(got, wanted)
        wanted.sum().backward()
        slots.gradients.finish()
        slots.end_iteration()
    assert len(plans) > 1


def _table_of(slots):
    """Addresses and sizes of the share table that a graph of preprocessing reads."""
    shares = slots.passes.in_use.shares
    return tuple(
        number for part in (shares.known, shares.expert_W) for number in (part.data_ptr(), *part.shape)
    )
