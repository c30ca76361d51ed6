"""Collects one iteration's loss and loads from all ranks and writes them on global rank 0."""

import atexit
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training.global_vars import get_args

from megatron_fssdp.megatron_adapter.resharding import ReshardReport
from megatron_fssdp.planning.load_statistics import balance_ratio, load_similarity, max_over_mean
from megatron_fssdp.reporting.run_records import IterationMetrics, LayerMetrics, LoadsWriter, MetricsWriter
from megatron_fssdp.runtime.layer_load import LayerLoad


@dataclass(frozen=True, eq=False)
class _StageRecord:
    """What a rank has to tell of one iteration, for its pipeline stage."""

    loss: float | None
    loads: list[LayerLoad]
    reshard: ReshardReport


class RunRecorder:
    """Writes ``metrics.jsonl`` and ``loads.npz`` while Megatron trains.

    Loads are gathered over the expert-data-parallel ranks (whose source devices are put
    side by side, so D counts all ranks of a pipeline stage) and then over the pipeline. The
    peers of expert tensor parallelism count as one device; their loads are one load already.
    Seconds of transfers and of re-shards are those of device 0 of every expert-parallel group.

    Args:
        record_dir: Folder of the run.
    """

    def __init__(self, record_dir: Path) -> None:
        self._record_dir = record_dir
        self._loads: LoadsWriter | None = None
        self._last_load_E: dict[int, np.ndarray] = {}
        self._metrics = MetricsWriter(record_dir) if dist.get_rank() == 0 else None
        # Megatron leaves its training loop through sys.exit as well.
        atexit.register(self.close)

    def record(
        self,
        step_result: Any,
        loads: list[LayerLoad],
        iteration_s: float,
        reshard: ReshardReport | None = None,
    ) -> None:
        """Record one iteration; collective.

        Args:
            step_result: What Megatron's ``train_step`` returned.
            loads: The layers' loads of this rank.
            iteration_s: Wall-clock seconds of the step on this rank.
            reshard: What was re-sharded before the step, if anything was.
        """
        losses, grad_norm = step_result[0], step_result[5]
        loss = float(next(iter(losses.values()))) if losses else None
        stages = _gather_stages(_StageRecord(loss, loads, reshard or ReshardReport(0, 0, 0.0)))
        if self._metrics is None:
            return
        args = get_args()
        iteration = args.curr_iteration + 1
        all_loads = sorted((load for stage in stages for load in stage.loads), key=lambda load: load.layer)
        tokens = get_current_global_batch_size() * args.seq_length
        self._metrics.append(
            IterationMetrics(
                iteration=iteration,
                lm_loss=next((stage.loss for stage in reversed(stages) if stage.loss is not None), math.nan),
                grad_norm=None if grad_norm is None else float(grad_norm),
                iteration_s=iteration_s,
                tokens_per_s=tokens / iteration_s,
                layers=tuple(_layer_metrics(load, self._last_load_E.get(load.layer)) for load in all_loads),
                resharded_experts=sum(stage.reshard.experts_moved for stage in stages),
                reshard_bytes=sum(stage.reshard.bytes_moved for stage in stages),
                reshard_s=max(stage.reshard.seconds for stage in stages),
            )
        )
        self._last_load_E = {load.layer: load.counts_DE.sum(axis=0) for load in all_loads}
        if all_loads:
            if self._loads is None:
                self._loads = LoadsWriter(self._record_dir, [load.layer for load in all_loads])
            self._loads.append(iteration, np.stack([load.counts_DE for load in all_loads]))

    def close(self) -> None:
        """Flush both files."""
        if self._metrics is not None:
            self._metrics.close()
        if self._loads is not None:
            self._loads.close()


def _gather_stages(own: _StageRecord) -> list[_StageRecord]:
    """Each pipeline stage's record, on global rank 0; empty elsewhere."""
    # Every rank of an expert-parallel group knows the whole group's loads.
    if parallel_state.get_expert_model_parallel_rank() != 0:
        return []
    copies: list[_StageRecord] = _gather(own, parallel_state.get_expert_data_parallel_group())
    if not copies:
        return []
    num_peers = parallel_state.get_expert_tensor_parallel_world_size()
    first = copies[0]
    # Every copy moves the same experts, and every peer its part of them.
    moved_bytes = num_peers * sum(copy.reshard.bytes_moved for copy in copies)
    stage = _StageRecord(
        first.loss,
        [_side_by_side(loads) for loads in zip(*(copy.loads for copy in copies), strict=True)],
        ReshardReport(first.reshard.experts_moved, moved_bytes, max(copy.reshard.seconds for copy in copies)),
    )
    return _gather(stage, parallel_state.get_pipeline_model_parallel_group())


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Everyone's value on the group's first rank; empty elsewhere."""
    if group.size() == 1:
        return [value]
    gathered: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, gathered, dst=dist.get_global_rank(group, 0), group=group)
    return gathered or []


def _side_by_side(loads: tuple[LayerLoad, ...]) -> LayerLoad:
    """One layer's loads in all its expert-parallel groups as if they were one group."""
    # Expert-tensor-parallel peers move equal parts of the same experts; one of them reports.
    num_peers = parallel_state.get_expert_tensor_parallel_world_size()
    return LayerLoad(
        layer=loads[0].layer,
        counts_DE=np.concatenate([load.counts_DE for load in loads]),
        owner_D=np.concatenate([load.owner_D for load in loads]),
        device_D=np.concatenate([load.device_D for load in loads]),
        num_replicas=sum(load.num_replicas for load in loads),
        spag_bytes=num_peers * sum(load.spag_bytes for load in loads),
        sprs_bytes=num_peers * sum(load.sprs_bytes for load in loads),
        cross_node_tokens=sum(load.cross_node_tokens for load in loads),
        spag_s=_mean([load.spag_s for load in loads]),
        spag_exposed_s=_mean([load.spag_exposed_s for load in loads]),
        sprs_s=_mean([load.sprs_s for load in loads]),
        sprs_exposed_s=_mean([load.sprs_exposed_s for load in loads]),
        schedule=loads[0].schedule,
        schedule_predicted_s=loads[0].schedule_predicted_s,
        strategy=loads[0].strategy,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _layer_metrics(load: LayerLoad, before_E: np.ndarray | None) -> LayerMetrics:
    return LayerMetrics(
        layer=load.layer,
        ep_load_max_over_mean=max_over_mean(load.owner_D),
        load_max_over_mean=max_over_mean(load.device_D),
        num_replicas=load.num_replicas,
        spag_bytes=load.spag_bytes,
        sprs_bytes=load.sprs_bytes,
        cross_node_tokens=load.cross_node_tokens,
        spag_s=load.spag_s,
        spag_exposed_s=load.spag_exposed_s,
        sprs_s=load.sprs_s,
        sprs_exposed_s=load.sprs_exposed_s,
        load_similarity=None if before_E is None else load_similarity(load.counts_DE.sum(axis=0), before_E),
        balance_ratio=balance_ratio(load.owner_D, load.device_D),
        schedule=load.schedule,
        schedule_predicted_s=load.schedule_predicted_s or None,
        strategy=load.strategy,
    )
