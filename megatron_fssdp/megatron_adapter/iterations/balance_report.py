"""Says in one line how evenly a training loads its devices: now and then, and at the end."""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core import parallel_state

from megatron_fssdp.planning.loads import EVEN_LOAD, max_over_mean
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price

logger = logging.getLogger(__name__)

INTERVAL_S = 60.0  # between two lines: often enough to see a trend, too seldom to fill a log


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
        self._knows_all = self._lacks_loads = False
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
            (layer.context, plan, load, layer.history.counts_DE(0))
            for layer, plan, load in zip(layers, plans, loads, strict=True)
            if plan is not None and not layer.history.is_empty and layer.context.num_devices > 1
        ]
        self._knows_all = len(self._last) == len(layers)
        self._lacks_loads = any(layer.history.is_empty and layer.context.num_devices > 1 for layer in layers)
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
        if speed := self._speed():
            clauses.append(f"MoE layers {speed:.2f} × as fast as under plain EP, by the planner's model")
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
        before = float(np.mean([max_over_mean(_plain_D(one, counts)) for one, *_, counts in self._last]))
        after_L = [_used_D(*used) for used in self._last]
        clauses = [f"busiest device {before:.2f} × mean load"]
        if all(after_D is not None for after_D in after_L):
            after = float(np.mean([max_over_mean(after_D) for after_D in after_L if after_D is not None]))
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

    def _speed(self) -> float | None:
        """Modelled seconds of the layers under plain EP, divided by those under their last plans."""
        plain_s = used_s = 0.0
        for context, plan, _, counts_DE in self._last:
            if plan.each_micro_batch or context.profile is None or not self._knows_all:
                return None
            times = context.profile.num_micro_batches
            owner_E = even_owners(context.num_experts, context.num_devices)
            plain = replace(context, owner_E=owner_E, resident=None)
            priced = plan_price(LayerPlan.owners_only(plain), counts_DE, plain, num_micro_batches=times)
            plain_s += priced.moe_s
            used_s += plan_price(plan, counts_DE, context, num_micro_batches=times).moe_s
        return plain_s / used_s if used_s else None


def _plain_D(context: LayerContext, counts_DE: np.ndarray) -> np.ndarray:
    owner_E = even_owners(context.num_experts, context.num_devices)
    return np.bincount(owner_E, weights=counts_DE.sum(axis=0), minlength=context.num_devices)


def _used_D(context: LayerContext, plan: LayerPlan, load: LayerLoad, counts_DE: np.ndarray) -> Any:
    """Measured loads of the devices, or the plan's; None if each micro-batch had its own plan."""
    if load.device_D.any():
        return load.device_D
    return None if plan.each_micro_batch else plan.dispatch(counts_DE, context.topology).device_tokens_D
