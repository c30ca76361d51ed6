"""Brings what the ranks know of an iteration to global rank 0: loads, times and memory.

Shape letters: L MoE layers.
"""

import resource
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fssdp.megatron_adapter.experts.resharding import ReshardReport
from megatron_fssdp.reporting.records.selection_metrics import SelectionMetrics
from megatron_fssdp.runtime.clocks.pass_timer import PassSeconds
from megatron_fssdp.runtime.layers.layer_load import LayerLoad


@dataclass(frozen=True, eq=False)
class StageRecord:
    """What one rank reports of an iteration for its pipeline stage.

    Attributes:
        loss: Loss of the language model; ``None`` on stages that do not compute it.
        loads: Loads of the stage's layers.
        reshard: What was re-sharded before the iteration.
        selection: What ``auto`` selected before the iteration; ``None`` if it did not reconsider.
    """

    loss: float | None
    loads: list[LayerLoad]
    reshard: ReshardReport
    selection: SelectionMetrics | None = None


def gather_stages(own: StageRecord) -> list[StageRecord]:
    """Return the record of each pipeline stage on global rank 0, and an empty list elsewhere. Collective."""
    loads = _with_passes_of_group(own.loads)
    # Every rank of an expert-parallel group knows the loads of the whole group, so device 0 reports.
    if parallel_state.get_expert_model_parallel_rank() != 0:
        return []
    copies: list[StageRecord] = gather(
        replace(own, loads=loads), parallel_state.get_expert_data_parallel_group()
    )
    if not copies:
        return []
    num_peers = parallel_state.get_expert_tensor_parallel_world_size()
    first = copies[0]
    # Every expert-data-parallel copy moves the same experts, and every expert-tensor-parallel peer moves its
    # part of them.
    moved_bytes = num_peers * sum(copy.reshard.bytes_moved for copy in copies)
    stage = StageRecord(
        first.loss,
        [_side_by_side(loads) for loads in zip(*(copy.loads for copy in copies), strict=True)],
        ReshardReport(first.reshard.experts_moved, moved_bytes, max(copy.reshard.seconds for copy in copies)),
        first.selection,
    )
    return gather(stage, parallel_state.get_pipeline_model_parallel_group())


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks on the group's first rank, and an empty list on other ranks."""
    if group.size() == 1:
        return [value]
    gathered: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, gathered, dst=dist.get_global_rank(group, 0), group=group)
    return gathered or []


def gather_peaks() -> tuple[int, ...]:
    """Return the peak memory of each rank in bytes on global rank 0; empty on other ranks. Collective."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        # Linux reports this number in KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    everyone = dist.group.WORLD
    assert everyone is not None  # training has begun
    return tuple(int(one.item()) for one in _gather_tensors(torch.tensor([peak]), everyone))


def _with_passes_of_group(loads: Sequence[LayerLoad]) -> list[LayerLoad]:
    """Return the loads with the seconds of passes of all ranks of the expert-parallel group, on its device 0.

    Collective over the group. On other devices, the result is of no use.
    """
    group = parallel_state.get_expert_model_parallel_group()
    own_L = [[astuple(load.forward), astuple(load.backward)] for load in loads]
    if not own_L or group.size() == 1:
        return list(loads)
    of_ranks = [ranks.tolist() for ranks in _gather_tensors(torch.tensor(own_L, dtype=torch.float64), group)]
    if not of_ranks:
        return list(loads)
    return [
        replace(
            load,
            forward=PassSeconds.combined([PassSeconds(*of_rank[i][0]) for of_rank in of_ranks]),
            backward=PassSeconds.combined([PassSeconds(*of_rank[i][1]) for of_rank in of_ranks]),
        )
        for i, load in enumerate(loads)
    ]


def _gather_tensors(own: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return equally large tensors of all ranks on the group's first rank, and an empty list elsewhere."""
    on_gpu = torch.cuda.is_available() and dist.get_backend(group) != "gloo"
    sent = own.to(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")
    gathered = [torch.empty_like(sent) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(sent, gathered, dst=dist.get_global_rank(group, 0), group=group)
    return [one.cpu() for one in gathered or ()]


def _side_by_side(loads: tuple[LayerLoad, ...]) -> LayerLoad:
    """Combine the loads of a layer in several expert-parallel groups as if they were one group."""
    # Only one of the expert-tensor-parallel peers reports, and all of them move equally large parts.
    num_peers = parallel_state.get_expert_tensor_parallel_world_size()
    return LayerLoad(
        layer=loads[0].layer,
        counts_DE=np.concatenate([load.counts_DE for load in loads]),
        owner_D=np.concatenate([load.owner_D for load in loads]),
        device_D=np.concatenate([load.device_D for load in loads]),
        by_nodes_N=_summed([load.by_nodes_N for load in loads]),
        by_devices_D=_summed([load.by_devices_D for load in loads]),
        num_replicas=sum(load.num_replicas for load in loads),
        spag_bytes=num_peers * sum(load.spag_bytes for load in loads),
        sprs_bytes=num_peers * sum(load.sprs_bytes for load in loads),
        cross_node_tokens=sum(load.cross_node_tokens for load in loads),
        spag_s=_mean([load.spag_s for load in loads]),
        spag_exposed_s=_mean([load.spag_exposed_s for load in loads]),
        sprs_s=_mean([load.sprs_s for load in loads]),
        sprs_exposed_s=_mean([load.sprs_exposed_s for load in loads]),
        placements=tuple(placement for load in loads for placement in load.placements),
        schedule=loads[0].schedule,
        schedule_predicted_s=loads[0].schedule_predicted_s,
        strategy=loads[0].strategy,
        forward=PassSeconds.combined([load.forward for load in loads]),
        backward=PassSeconds.combined([load.backward for load in loads]),
    )


def _summed(histograms: list[np.ndarray]) -> np.ndarray:
    """Sum histograms; the expert-parallel groups of a stage may be on different numbers of nodes."""
    length = max(map(len, histograms))
    return np.sum([np.pad(one, (0, length - len(one))) for one in histograms], axis=0)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
