"""Brings what the ranks know of an iteration to global rank 0: loads, times and memory."""

import resource
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fssdp.megatron_adapter.experts.resharding import ReshardReport
from megatron_fssdp.records.metrics import SelectionMetrics
from megatron_fssdp.runtime.clocks.pass_timer import PassSeconds
from megatron_fssdp.runtime.layers.layer_load import LayerLoad


@dataclass(frozen=True, eq=False)
class StageRecord:
    """What one rank reports of an iteration for its pipeline stage."""

    loss: float | None  # of the language model; None on stages that do not compute it
    loads: list[LayerLoad]
    reshard: ReshardReport  # before the iteration
    selection: SelectionMetrics | None = None  # of auto before the iteration; None if it did not reconsider


def gather_stages(own: StageRecord) -> list[StageRecord]:
    """Return the record of each pipeline stage on global rank 0, and an empty list elsewhere. Collective."""
    passes = [(load.forward, load.backward) for load in own.loads]
    of_ranks = gather(passes, parallel_state.get_expert_model_parallel_group())
    # Every rank of an expert-parallel group knows the loads of the whole group, so device 0 reports.
    if not of_ranks:
        return []
    loads = [
        replace(
            load,
            forward=PassSeconds.combined([forward for forward, _ in of_layer]),
            backward=PassSeconds.combined([backward for _, backward in of_layer]),
        )
        for load, of_layer in zip(own.loads, zip(*of_ranks, strict=True), strict=True)
    ]
    copies: list[StageRecord] = gather(
        replace(own, loads=loads), parallel_state.get_expert_data_parallel_group()
    )
    if not copies:
        return []
    # Every expert-data-parallel copy moves the same experts, and every expert-tensor-parallel peer moves its
    # part of them.
    moved_bytes = _num_peers() * sum(copy.reshard.bytes_moved for copy in copies)
    seconds = max(copy.reshard.seconds for copy in copies)
    stage = replace(
        copies[0],
        loads=[_side_by_side(loads) for loads in zip(*(copy.loads for copy in copies), strict=True)],
        reshard=ReshardReport(own.reshard.experts_moved, moved_bytes, seconds),
    )
    return gather(stage, parallel_state.get_pipeline_model_parallel_group())


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of a group (``None``: all ranks) on its first rank, and an empty list elsewhere."""
    group = group or dist.group.WORLD
    assert group is not None  # training has begun
    if group.size() == 1:
        return [value]
    gathered: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, gathered, dst=dist.get_global_rank(group, 0), group=group)
    return gathered or []


def gather_peaks() -> tuple[int, ...]:
    """Return the peak memory of each rank in bytes on global rank 0; empty on other ranks. Collective."""
    if torch.cuda.is_available():
        return tuple(gather(torch.cuda.max_memory_allocated(), None))
    # Linux reports this number in KiB.
    return tuple(gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None))


def _side_by_side(loads: tuple[LayerLoad, ...]) -> LayerLoad:
    """Combine the loads of a layer in several expert-parallel groups as if they were one group."""

    def of_all(name: str) -> list[Any]:
        return [getattr(load, name) for load in loads]

    combined: dict[str, Any] = {"placements": sum(of_all("placements"), ())}
    for name in ("counts_DE", "owner_D", "device_D"):
        combined[name] = np.concatenate(of_all(name))
    for name in ("by_nodes_N", "by_devices_D"):
        combined[name] = _summed(of_all(name))
    for name in ("num_replicas", "cross_node_tokens"):
        combined[name] = sum(of_all(name))
    for name in ("spag_bytes", "sprs_bytes"):
        # Only one of the expert-tensor-parallel peers reports, and all of them move equally large parts.
        combined[name] = _num_peers() * sum(of_all(name))
    for name in ("spag_s", "spag_exposed_s", "sprs_s", "sprs_exposed_s"):
        combined[name] = sum(of_all(name)) / len(loads)
    for name in ("forward", "backward"):
        combined[name] = PassSeconds.combined(of_all(name))
    return replace(loads[0], **combined)


def _num_peers() -> int:
    return int(parallel_state.get_expert_tensor_parallel_world_size())


def _summed(histograms: list[np.ndarray]) -> np.ndarray:
    """Sum histograms; the expert-parallel groups of a stage may be on different numbers of nodes."""
    length = max(map(len, histograms))
    return np.sum([np.pad(one, (0, length - len(one))) for one in histograms], axis=0)
