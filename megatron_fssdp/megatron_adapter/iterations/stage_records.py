"""Brings what the ranks know of an iteration to global rank 0, in one gather, and puts it together there.

Shape letters: Z micro-batches, D devices, E experts.
"""

import os
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.megatron_adapter.experts.expert_slots import ReshardReport
from megatron_fssdp.runtime.clocks.pass_timer import PassSeconds
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.strategies.auto.auto_strategy import SelectionReport


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB.


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)


@dataclass
class IterationFacts:
    """What this rank's loop has done in an iteration, by what passed the seams of megatron-core."""

    loss_sum: Any = 0.0  # of the first loss that the schedule returns, with the number of what it sums
    loss_count: Any = 0
    num_sequences: int = 0  # of this rank
    seq_length: int = 0
    grad_norm: Any = None
    reshard: ReshardReport | None = None  # before the iteration
    selection: SelectionReport | None = None  # of auto before the iteration; None if it did not reconsider
    passes_s: float = 0.0
    iteration_s: float = 0.0

    def note(self, results: Any, given: Mapping[str, Any]) -> None:
        """Note what a schedule was given and has returned; only the last pipeline stage gets losses."""
        # Without a pipeline, Megatron does not read sizes, so a loop may have None there.
        self.num_sequences += given["num_microbatches"] * (given["micro_batch_size"] or 0)
        self.seq_length = given["seq_length"] or 0
        for losses in results if isinstance(results, list) else ():
            loss = next(iter(losses.values()), None) if isinstance(losses, dict) else None
            parts = loss.detach().flatten() if isinstance(loss, torch.Tensor) else loss
            parts = parts if isinstance(parts, torch.Tensor | list | tuple) else [parts]
            # A mean, or a sum with the number of what it sums. Loops may return anything else, too.
            if len(parts) in (1, 2) and all(map(_is_number, parts)):
                self.loss_sum, self.loss_count = self.loss_sum + parts[0], self.loss_count + (*parts, 1)[1]

    @property
    def loss(self) -> tuple[float, float] | None:
        """Sum and number of the losses of this rank; the host waits for the device."""
        return (float(self.loss_sum), float(self.loss_count)) if float(self.loss_count) else None


@dataclass(frozen=True, eq=False)
class RankRecord:
    """What one rank reports of an iteration, or all ranks of a pipeline stage together."""

    loss: tuple[float, float] | None  # sum and number of losses; None on stages that do not compute them
    loads: list[LayerLoad]  # of its expert-parallel group; empty on other devices than the group's first
    passes: list[tuple[PassSeconds, PassSeconds]]  # forward and backward on this rank, by layer
    reshard: ReshardReport
    selection: SelectionReport | None
    sequences: tuple[int, int]  # number, which may differ between ranks, and length; 0 without passes
    stage: int = field(default_factory=parallel_state.get_pipeline_model_parallel_rank)
    peer: int = field(default_factory=parallel_state.get_expert_tensor_parallel_rank)
    device: int = field(default_factory=parallel_state.get_expert_model_parallel_rank)
    host: str = field(default_factory=socket.gethostname)
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    peak_bytes: int = field(default_factory=_peak_bytes)


def firsts() -> dist.ProcessGroup:
    """Make a group of the first ranks of all expert-parallel groups, and rank 0. Collective over all ranks.

    Only these gather loads: NCCL takes the longest part of a gather once for each rank, on the device of
    rank 0.
    """
    places = of_all_ranks(parallel_state.get_expert_model_parallel_rank())
    ranks = [rank for rank, place in enumerate(places) if not (rank and place)]
    group: dist.ProcessGroup = parallel_state.create_group(ranks, group_desc="FSSDP_RECORDS_GROUP")
    return group


def gathered(
    facts: IterationFacts, loads: list[LayerLoad], group: dist.ProcessGroup, *, of_micro_batches: bool
) -> list[RankRecord]:
    """Return the records of all ranks on global rank 0, and an empty list elsewhere. Collective.

    The ``group`` is that of :func:`firsts`.
    """
    passes = [(load.forward, load.backward) for load in loads]
    reshard, sequences = facts.reshard or ReshardReport(0, 0, 0.0), (facts.num_sequences, facts.seq_length)
    records = _gathered(RankRecord(facts.loss, [], passes, reshard, facts.selection, sequences), None)
    if parallel_state.get_expert_model_parallel_rank() == 0 or dist.get_rank() == 0:
        reported = [
            replace(load, micro_batches=[], counts_ZDE=load.single_counts() if of_micro_batches else None)
            for load in loads
        ]
        for rank, of_rank in _gathered((dist.get_rank(), reported), group):
            records[rank] = replace(records[rank], loads=of_rank)
    return records


def _gathered(own: Any, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else []
    dist.gather_object(own, values or None, dst=0, group=group)
    return values


def by_stage(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Return one record for each pipeline stage from those of all ranks, in the order of ranks."""
    return [
        _stage([record for record in records if record.stage == stage])
        for stage in sorted({record.stage for record in records})
    ]


def _stage(ranks: list[RankRecord]) -> RankRecord:
    # Every expert-parallel group moves its experts, and every expert-tensor-parallel peer its part of them.
    groups = [record for record in ranks if record.device == 0]
    reshards = [record.reshard for record in groups]
    moved_bytes = sum(reshard.bytes_moved for reshard in reshards)
    seconds = max(reshard.seconds for reshard in reshards)
    losses = [number for record in ranks for number in record.loss or ()]
    return replace(
        groups[0],
        loss=(sum(losses[::2]), sum(losses[1::2])) if losses else None,
        loads=[
            _layer(
                [record.loads[index] for record in groups if record.peer == 0],
                [record.loads[index] for record in groups],
                [record.passes[index] for record in ranks],
            )
            for index in range(len(groups[0].loads))
        ],
        reshard=ReshardReport(reshards[0].experts_moved, moved_bytes, seconds),
    )


def _layer(
    copies: list[LayerLoad], groups: list[LayerLoad], passes: list[tuple[PassSeconds, PassSeconds]]
) -> LayerLoad:
    """Combine a layer's loads in several groups; ``copies`` are those without expert-tensor peers."""

    def of(loads: list[LayerLoad], name: str) -> list[Any]:
        return list(map(attrgetter(name), loads))

    combined: dict[str, Any] = {"placements": sum(of(copies, "placements"), ())}
    combined |= {name: np.concatenate(of(copies, name)) for name in ("counts_DE", "owner_D", "device_D")}
    combined |= {name: sum(_padded(of(copies, name))) for name in ("by_nodes_N", "by_devices_D")}
    single = of(copies, "counts_ZDE")
    known = all(counts is not None for counts in single)
    combined["counts_ZDE"] = np.concatenate(_padded(single), axis=1) if known else None
    combined |= {name: sum(of(copies, name)) for name in ("num_replicas", "cross_node_tokens")}
    combined |= {name: sum(of(groups, name)) for name in ("spag_bytes", "sprs_bytes")}
    for name in ("spag_s", "spag_exposed_s", "sprs_s", "sprs_exposed_s"):
        combined[name] = sum(of(copies, name)) / len(copies)
    forward, backward = map(PassSeconds.combined, zip(*passes, strict=True))
    return replace(copies[0], **combined, forward=forward, backward=backward)


def _padded(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Make arrays of expert-parallel groups, which can be on different numbers of nodes, equally long."""
    longest = max(map(len, arrays))
    rests = (np.zeros((longest - len(array), *array.shape[1:]), array.dtype) for array in arrays)
    return list(map(np.concatenate, zip(arrays, rests, strict=True)))
