"""What a training says of itself, in lines: at its start, now and then, and at its end."""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.utils import get_model_config, log_single_rank

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostModel, HostSettings
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.planning.compiled_form import kernel_form
from megatron_fssdp.planning.loads import EVEN_LOAD, max_over_mean
from megatron_fssdp.planning.memory import ExpertMemory, ExpertOptimizer, HeldReplicas, expert_memory
from megatron_fssdp.planning.replica_life import PipelineStage
from megatron_fssdp.planning.transfer.message_size import message_rule
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan

logger = logging.getLogger(__name__)

INTERVAL_S = 60.0  # between two lines: often enough to see a trend, too seldom to fill a log


def report_installation(model: HostModel) -> None:
    """Log one line about the layers of a model that have joined, on global rank 0. Collective."""
    session = model.session
    assert session is not None
    layers = session.runtime.layers
    if not sum(of_all_ranks(len(layers))):
        raise ConfigurationError(
            f"--moe-strategy {model.name}: got a model with experts and no MoE layer on any rank, wanted "
            "Megatron's MoE layers; build the model from Megatron's MoE specs, or use --moe-strategy none"
        )
    place = "the MoE layers of other pipeline stages; this stage has no MoE layer"
    if layers:
        context = layers[0].local.context
        numbers = ", ".join(str(layer.local.context.layer) for layer in layers)
        place = (
            f"{len(layers)} MoE layers of this pipeline stage (layers {numbers}), {context.num_experts} "
            f"experts on {context.num_devices} devices in {context.topology.num_nodes} node(s)"
        )
    settings = model.settings.model_dump(exclude_defaults=True, mode="json")
    shown = " ".join(f"{key}={value}" for key, value in settings.items()) or "all by default"
    log_single_rank(
        logger,
        logging.INFO,
        f"[fssdp] strategy {model.name}: installed in {place}; settings: {shown}; planning "
        f"kernels: {kernel_form()}",
    )


def reports_for_stage() -> bool:
    """Whether this rank logs for its pipeline stage."""
    return not (
        parallel_state.get_expert_model_parallel_rank()
        or parallel_state.get_expert_data_parallel_rank()
        or parallel_state.get_expert_tensor_parallel_rank()
    )


def report_memory(session: StrategySession, host: HostSettings, held: HeldReplicas) -> None:
    """Log one line for each pipeline stage. All ranks of a stage have the same number of slots."""
    if reports_for_stage():
        logger.info(f"[fssdp] memory of a rank: {account_memory(session, host, held).describe()}")


def account_memory(session: StrategySession, host: HostSettings, held: HeldReplicas) -> ExpertMemory:
    """Return the bytes of this rank's experts under the strategy's limits; there must be a layer."""
    layers = session.runtime.layers
    first = layers[0]
    layout, context = first.local.experts.layout(), first.local.context
    per_layer = context.num_experts // context.num_devices
    # After a re-shard, this rank may own no expert of a layer, but it owns experts of some layer.
    parameter = next(ps[0] for layer in layers for ps in layer.local.experts.parameters.values())
    main_grad = getattr(parameter, "main_grad", None)
    return expert_memory(
        held=held,
        slots_per_device=len(layers) * per_layer,
        # Some strategies set no limit. A device then has at most the experts that it does not own.
        replicas={
            life: min(slots, context.num_experts - per_layer)
            for life, slots in session.strategy.slots_by_life(context).items()
        },
        owned_per_layer=per_layer,
        gradient_bytes=layout.dtype.itemsize if main_grad is None else main_grad.element_size(),
        optimizer=expert_optimizer(host),
        expert_data_parallel_size=parallel_state.get_expert_data_parallel_world_size(),
        messages=message_rule(on_cuda=parameter.device.type == "cuda"),
    )


def held_replicas(
    session: StrategySession, model: Sequence[Any], host: HostSettings, num_micro_batches: int
) -> HeldReplicas:
    """Return how many replicas exist at once on this rank in the largest iteration that is known of."""
    stage = PipelineStage(
        tuple(sum(isinstance(module, StrategyMoELayer) for module in chunk.modules()) for chunk in model),
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        group_size=get_model_config(model[0]).microbatch_group_size_per_vp_stage,
    )
    # Transformer Engine quantizes weights for each direction, and mxfp8 has a scale for every 32 elements.
    is_quantized = bool(host.fp8 or host.fp4)
    layouts = [layer.local.experts.layout() for layer in session.runtime.layers]
    return HeldReplicas(
        session.strategy.replica_life,
        stage,
        *next(((layout.numel, layout.dtype.itemsize) for layout in layouts), (0, 0)),
        _most_micro_batches(host, num_micro_batches),
        copy_bytes=2 * (1 + 1 / 32) if is_quantized else 0.0,
        trained_share=max((layout.trained_numel / layout.numel for layout in layouts), default=1.0),
    )


def _most_micro_batches(host: HostSettings, announced: int) -> int:
    calculators = num_microbatches_calculator
    if calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:  # not every host has it
        return max(announced, 1)
    now = max(int(calculators.get_num_microbatches()), announced)
    if (schedule := host.step_batch_size_schedule) is None:
        return now
    steps = calculators.StepBatchsizeNumMicroBatchesCalculator._parse_schedule(schedule, None)
    largest = max(batch_size for _, batch_size in steps)
    return max(now, largest // (host.micro_batch_size * host.data_parallel_size))


def expert_optimizer(host: HostSettings) -> ExpertOptimizer:
    """Return what Megatron's optimizer keeps for every expert."""
    # States with a parameter's size: a momentum, or Adam's two moments.
    num_states = {"sgd": int(host.sgd_momentum != 0), "lion": 1, "muon": 1, "dist_muon": 1}
    return ExpertOptimizer(
        num_state_tensors=num_states.get(host.optimizer, 2),
        has_master_weights=host.fp16 or host.bf16,
        is_distributed=bool(host.use_distributed_optimizer),
    )


class BalanceReport:
    """The loads of a stage's layers under their last plans, and the waits of all iterations.

    One rank of a pipeline stage has it, and knows the loads of its own expert-parallel group. It keeps
    nothing of the model, so that it can tell of one that is gone. ``record_dir`` is that of the run, if any.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self.record_dir: Path | None = None
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._told_s = -INTERVAL_S
        self._iteration = self._num_noted = self._num_measured = 0
        self._lacks_loads = False
        self._last: list[tuple[LayerContext, LayerPlan, LayerLoad, np.ndarray]] = []
        self._seconds_3 = np.zeros(3)  # of measured iterations; waiting for weights, for gradients

    def note(
        self,
        iteration: int,
        layers: Sequence[SlotLayer],
        plans: Sequence[LayerPlan | None],
        loads: Sequence[LayerLoad],
        seconds: float,
        *,
        is_logged: bool,
    ) -> None:
        """Note an iteration with the last plan of each layer; log a line if Megatron logs the iteration."""
        self._iteration = iteration
        self._last = [
            (layer.local.context, plan, load, layer.history.counts_DE(0))
            for layer, plan, load in zip(layers, plans, loads, strict=True)
            if plan is not None and not layer.history.is_empty and layer.local.context.num_devices > 1
        ]
        self._lacks_loads = any(
            layer.history.is_empty and layer.local.context.num_devices > 1 for layer in layers
        )
        if self._num_noted == 1:  # the first iteration also allocates; pages of runs leave it out, too
            self._num_measured, self._seconds_3 = 0, np.zeros(3)
        self._num_noted += 1
        waits = [(load.spag_exposed_s, load.sprs_exposed_s) for load in loads]
        if any(load.spag_s or load.sprs_s for load in loads):
            self._num_measured += 1
            self._seconds_3 += (seconds, *np.sum(waits, axis=0))
        if is_logged and time.monotonic() - self._told_s >= INTERVAL_S and (clauses := self._balance()):
            self._told_s = time.monotonic()
            logger.info(f"[fssdp] iteration {iteration}: {'; '.join(clauses)}")

    def tell_end(self) -> None:
        """Log what the strategy did, and the folder of its records, in one line at the end of a training.

        A program that an error ends says nothing.
        """
        if hasattr(sys, "last_exc"):
            return
        clauses = self._balance()
        if not clauses:
            if self._lacks_loads:
                logger.warning(
                    f"[fssdp] {self._strategy} at the end, iteration {self._iteration}: it knew no loads and "
                    "balanced nothing; passes are counted in training mode, or if a schedule trains by them"
                )
            return
        if self._num_measured:
            total_s, *waits_s = self._seconds_3.tolist()
            weights, gradients = (
                f"{1e3 * wait_s / self._num_measured:.3g} ms ({wait_s / total_s:.1%})" for wait_s in waits_s
            )
            clauses.append(f"an iteration waits {weights} for weights and {gradients} for gradients")
        where = "" if self._num_stages == 1 else f", stage {self._stage}"
        next_step = ""
        if not self._stage:
            kept = "" if self.record_dir else "record with --moe-strategy-set record_dir=DIR, then "
            next_step = f". Next: {kept}megatron-fssdp report {self.record_dir or 'DIR'}"
        logger.info(
            f"[fssdp] {self._strategy} at the end, iteration {self._iteration}{where}: "
            f"{'; '.join(clauses)}{next_step}"
        )

    def _balance(self) -> list[str]:
        if not self._last:
            return []
        # Plain EP divides experts evenly, in their order.
        plain_L = [
            counts_DE.sum(axis=0).reshape(len(counts_DE), -1).sum(axis=1) for *_, counts_DE in self._last
        ]
        before = float(np.mean(list(map(max_over_mean, plain_L))))
        clauses = [f"busiest device {before:.2f} × mean load"]
        # Measured loads of the devices, or the plan's; if each micro-batch had its own plan, nobody knows.
        if all(load.device_D.any() or not plan.each_micro_batch for _, plan, load, _ in self._last):
            after_L = [
                load.device_D
                if load.device_D.any()
                else plan.dispatch(counts_DE, context.topology).device_tokens_D
                for context, plan, load, counts_DE in self._last
            ]
            after = float(np.mean(list(map(max_over_mean, after_L))))
            if round(after, 2) != round(before, 2):
                clauses = [f"busiest device {before:.2f} → {after:.2f} × mean load"]
        placements = [load.placements or (plan.placement,) for _, plan, load, _ in self._last]
        replicas = float(np.mean([of[0].num_replicas for of in placements]))
        if replicas:
            context = self._last[0][0]
            possible = context.num_experts * (context.num_devices - 1)
            clauses.append(f"{replicas:.3g} of {possible:,} possible replicas a layer")
            if replicas == possible:
                clauses.append("every expert is on every device, as without expert parallelism")
        if before <= EVEN_LOAD:
            clauses.append("loads are almost even without balancing, so plain EP would do")
        return clauses
