"""What happens between two iterations of a model: measuring, selecting, re-sharding, replicating.

All of it is collective: all ranks that hold experts of a pipeline stage decide alike.
"""

import logging
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.megatron_adapter.experts import gradient_sync
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertResharding, ReshardReport
from megatron_fssdp.megatron_adapter.experts.resident_experts import ResidentExperts
from megatron_fssdp.megatron_adapter.experts.slot_quantities import members_of
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostModel
from megatron_fssdp.megatron_adapter.iterations.training_reports import (
    BalanceReport,
    expert_optimizer,
    held_replicas,
    report_memory,
    reports_for_stage,
)
from megatron_fssdp.megatron_adapter.support.limits import keeps_flex
from megatron_fssdp.megatron_adapter.support.megatron_settings import MegatronSettings
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.layer_profiling import profile_layers
from megatron_fssdp.runtime.layers.strategy_selector import select_strategies
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.strategies.auto.auto_strategy import SelectionReport, selecting
from megatron_fssdp.strategies.layer_plan import LayerPlan
from megatron_fssdp.strategies.layer_planning import StageLoads, moved_before

logger = logging.getLogger(__name__)


class IterationDriver:
    """Prepares, begins and ends the iterations of one model under a strategy.

    :meth:`prepare` measures, or lets ``auto`` select, then re-shards owners or changes resident replicas. If
    owners shall move or replicas be resident, and slots cannot be exchanged, the constructor raises a
    ConfigurationError, or :meth:`prepare` after the first iteration.
    """

    def __init__(self, model: HostModel, optimizer: Any, num_micro_batches: int) -> None:
        assert model.session is not None
        session = self._session = model.session
        self._host, self._optimizer = model.host, optimizer
        self.runtime = session.runtime
        self.held = held_replicas(session, model.chunks, self._host, num_micro_batches)
        # What was moved, and what auto selected, before the running iteration.
        self.reshard: ReshardReport | None = None
        self.selection: SelectionReport | None = None
        self._iterations_to_measure = self._measured_replicas_bytes = self._peak_bytes = 0
        self._most_micro_batches = 0  # of an iteration so far; not every loop announces all of them before
        self._began_s = 0.0
        self._number = 0
        self._versions = session.slots.versions()  # after the last step, move, or write that is known
        self._residents: ResidentExperts | None = None
        self._states_are_checked = False
        self._told_exchange: set[int] = set()
        layers, strategy = self.runtime.layers, session.strategy
        self.balance = BalanceReport(model.name) if reports_for_stage() else None
        if self.balance is not None:
            # At the end of the training, of its model, or of a program that ends well.
            self._told = weakref.finalize(self, self.balance.tell_end)
        copies = parallel_state.get_expert_data_parallel_group()
        if strategy.resident_slots and parallel_state.get_expert_model_parallel_world_size() > 1:
            slots = strategy.resident_slots
            self._residents = ResidentExperts(session.slots, slots, model.chunks, optimizer, copies)
        if not layers or layers[0].local.context.num_devices == 1:
            return
        if strategy.moves_owners:
            owned, devices = session.slots.parameters, layers[0].groups.expert_parallel
            session.slots.resharding = ExpertResharding(owned, devices, copies, model.chunks, optimizer)
        self._iterations_to_measure = strategy.profile_iterations
        if self._iterations_to_measure:
            for layer in layers:
                layer.local.stopwatch = LayerStopwatch()
        else:  # Until costs are measured, there are no limits, and no replicas.
            report_memory(session, self._host, self.held)

    @property
    def _groups_of_owners(self) -> list[dist.ProcessGroup]:
        # Their ranks agree if they must have equal plans or share owners.
        return [
            self.runtime.layers[0].groups.expert_parallel,
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_data_parallel_group(),
        ]

    def prepare(self, iteration: int, num_micro_batches: int) -> None:
        """Prepare the iteration after ``iteration`` complete ones, before its first forward pass."""
        session = self._session
        if self._number and not self._states_are_checked:
            # The first step has made most states. If they cannot be moved, the run should fail now.
            self._states_are_checked = True
            for holder in (session.slots.resharding, self._residents):
                if holder is not None:
                    holder.quantities()
        if self._iterations_to_measure:
            self._iterations_to_measure -= 1
        elif self.runtime.layers and self.runtime.layers[0].local.stopwatch is not None:
            self._profile(max(num_micro_batches, self._most_micro_batches, 1))
            self.runtime.drop_plans()
        self.selection = None
        layers, strategy = session.slots.layers, session.strategy
        if layers and layers[0].local.context.num_devices > 1 and selecting(strategy):
            # Layers of multi-token prediction keep their strategy.
            self.selection = select_strategies(strategy, self._groups_of_owners, layers, iteration)
        if self.selection is not None:
            self.runtime.drop_plans()
            if reports_for_stage():
                logger.info(f"[fssdp] auto, after iteration {iteration}: {self.selection.describe()}")
        session.slots.move_to_saved()
        self.reshard = self._moved(iteration)

    def begin(self, iteration: int, num_micro_batches: int) -> None:
        """Begin the iteration that was prepared."""
        if self._residents is not None:
            self._residents.zero_gradients()
        self.note_weights()
        self._number, self._began_s = iteration + 1, time.perf_counter()
        self.runtime.begin_iteration(num_micro_batches, iteration + 1)

    def check_weights(self) -> None:
        """Refuse weights that somebody wrote or froze where experts are elsewhere, or have residents."""
        slots = self._session.slots
        are_written, trained = self._versions != slots.versions(), slots.trained()
        changed = "got weights of experts that were written, loaded or frozen outside of the optimizer"
        has_residents = self._residents is not None and self._residents.holds_any
        if has_residents and (are_written or not all(map(all, trained))):
            raise ConfigurationError(
                f"resident replicas: {changed}, wanted weights that only the optimizer changes; use another "
                "--moe-strategy"
            )
        if slots.layers and not slots.owners.is_even and (are_written or len(trained) > 1):
            raise ConfigurationError(
                f"re-sharding: {changed}, while Parameters hold other experts than their names say, wanted "
                "this with experts at home; call megatron_fssdp.restore_owners(model) before, or "
                f"{KEEP_OWNERS}"
            )

    def note_weights(self) -> None:
        """Take the weights of experts as known: experts have moved, or the optimizer has stepped."""
        self._versions = self._session.slots.versions()

    def forget_weights(self) -> None:
        """Take the weights of experts as written: the loop has loaded states of its optimizer."""
        self._versions = []

    def renew_replicas(self) -> None:
        """Let this iteration's replicas follow weights that were written between two calls of a schedule.

        Loops do so to compute with a reference's weights for a while. All ranks must have written.
        """
        if self._versions != (versions := self._session.slots.versions()):
            self._versions = versions
            for transfers in self._kept_replicas():
                transfers.release()

    def check_replicas(self) -> None:
        """Refuse weights that somebody has written or frozen since this iteration's replicas got theirs."""
        if self._residents is not None:
            self.check_weights()
        if any(self._kept_replicas()) and self._versions != self._session.slots.versions():
            raise ConfigurationError(
                "replicas: got weights of experts that were written in the middle of an iteration, wanted "
                "this between two; set gradients to zero after it, or use --moe-strategy none"
            )

    def _kept_replicas(self) -> Iterator[ReplicaTransfers]:
        passes = (layer.passes.shared for layer in self.runtime.layers)
        for slot_pass in passes:
            if slot_pass is not None and slot_pass.transfers is not None and not slot_pass.plan.rematerialize:
                yield slot_pass.transfers

    def begin_step(self, optimizer: Any) -> None:
        """Bring all gradients home, and start to share counts, before the step of an optimizer."""
        has_states = self._residents is not None or self._session.slots.resharding is not None
        if has_states and not {*members_of(optimizer)} <= {*members_of(self._optimizer)}:
            raise ConfigurationError(
                "re-sharding or resident replicas: got a step of an optimizer that was built after the first "
                "iteration, wanted those of before, whose states follow the experts; build it before, "
                f"{KEEP_OWNERS}, or use another --moe-strategy"
            )
        with self.following():
            self.runtime.finish_gradients()
        self.runtime.end_passes()
        if self._residents is not None:
            self._residents.begin_step()

    def following(self) -> AbstractContextManager[None]:
        """Surround changes of gradients that resident replicas follow."""
        return nullcontext() if self._residents is None else self._residents.following()

    def note_more_steps(self) -> None:
        """Take weights as known that an optimizer has written after the iteration; residents missed it."""
        if self._residents is None:
            self.note_weights()

    def end_step(self, has_stepped: bool, grad_norm: Any) -> None:
        """Let resident replicas follow the model's step."""
        if self._residents is not None and has_stepped:
            self._residents.step(grad_norm)

    def drop(self) -> None:
        """Drop an iteration that was not ended."""
        gradient_sync.forget_waiting(self.runtime.layers)
        self.runtime.reset_gradients()

    def end(self) -> list[LayerLoad]:
        """End an iteration after the optimizer step, and return what each layer did."""
        self.note_weights()
        if self._session.strategy.travel.exchange == "by_price":
            self._tell_exchange()
        plans = [layer.passes.plan for layer in self.runtime.layers]
        passes = max((layer.gradients.num_complete for layer in self.runtime.layers), default=0)
        announced = self.runtime.clock.num_micro_batches
        self._most_micro_batches = max(self._most_micro_batches, announced or passes)
        loads = self.runtime.end_iteration()
        if self.balance is not None:
            seconds = time.perf_counter() - self._began_s
            is_logged = self._number % (self._host.log_interval or 1) == 0
            self.balance.note(self._number, self.runtime.layers, plans, loads, seconds, is_logged=is_logged)
        if any(layer.local.stopwatch is not None for layer in self.runtime.layers):
            num_bytes = self._replicas_bytes(plans, loads)
            self._measured_replicas_bytes = max(self._measured_replicas_bytes, num_bytes)
            # Hosts reset torch's peak, for reports of their own.
            if torch.cuda.is_available():
                self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated())
        return loads

    def tell_end(self) -> None:
        """Say once how even the loads were."""
        if self.balance is not None:
            self._told()

    def _tell_exchange(self) -> None:
        layers = (
            layer for layer in self.runtime.layers if layer.passes.plan and layer.passes.plan.deduplicated
        )
        numbers = {layer.local.context.layer for layer in layers} - self._told_exchange
        self._told_exchange |= numbers
        if numbers and reports_for_stage():
            logger.info(
                f"[fssdp] exchange by price, iteration {self.runtime.clock.iteration}: layers "
                f"{', '.join(map(str, sorted(numbers)))} send each token once to a node"
            )

    def _replicas_bytes(self, plans: Sequence[LayerPlan | None], loads: Sequence[LayerLoad]) -> int:
        device = self.runtime.layers[0].groups.device
        # Replicas of one layer's pass may be gone at the peak, so they are not taken off.
        kept = [load for plan, load in zip(plans, loads, strict=True) if plan and not plan.rematerialize]
        return self.held.bytes_at_peak(
            [int(placement.replicas_per_device_D[device]) for load in kept for placement in load.placements]
        )

    def _profile(self, num_micro_batches: int) -> None:
        layers = self.runtime.layers
        layout = layers[0].local.experts.layout()
        copies, optimizer = parallel_state.get_expert_data_parallel_group(), expert_optimizer(self._host)
        is_fused = keeps_flex(MegatronSettings.of(*self._host.sources), self._session.strategy)
        profile_layers(
            layers,
            self._groups_of_owners,
            free_bytes=_free_bytes(self._peak_bytes - self._measured_replicas_bytes),
            token_bytes=self._host.hidden_size * layout.dtype.itemsize,
            owned_bytes=optimizer.owned_bytes(layout.num_bytes, layout.trained_numel, copies.size()),
            num_micro_batches=num_micro_batches,
            held=self.held,
            choices=TokenChoices(self._host.moe_router_topk, is_fused=is_fused),
            deduplicated=self._session.strategy.travel.exchange == "deduplicated",
        )
        context, strategy = layers[0].local.context, self._session.strategy
        self.held = self.held.for_at_least(context.costs.num_micro_batches)
        if reports_for_stage() and context.profile is not None:
            cluster = context.profile.cluster
            intra, inter, alone = (
                f"{link.alpha_s * 1e6:.0f} us + {1e-9 / link.beta_s_per_byte:.2f} GB/s"
                for link in (cluster.intra, cluster.inter, cluster.inter_device)
            )
            logger.info(
                f"[fssdp] measured in {strategy.profile_iterations} iterations: compute before a layer "
                f"{context.profile.non_moe_s * 1e3:.3f} ms, links inside a node {intra}, between nodes "
                f"{inter}, one device {alone}, experts {cluster.expert_flops_per_s / 1e9:.2f} GFLOP/s per "
                f"device; {strategy.limits(context)}"
            )
        report_memory(self._session, self._host, self.held)

    def _moved(self, iteration: int) -> ReshardReport | None:
        strategy, slots = self._session.strategy, self._session.slots
        if not slots.layers or slots.layers[0].local.context.num_devices == 1:
            return None
        moved = moved_before(strategy, iteration, self._loads_of_copies, slots.owners)
        if isinstance(moved, OwnerMap):
            return slots.move_to(moved)
        if moved is None or self._residents is None:
            return None
        report = self._residents.hold(moved)
        if report is not None and reports_for_stage():
            num_replicas = sum(placement.num_replicas for placement in moved)
            logger.info(
                f"[fssdp] resident replicas: {num_replicas} on this pipeline "
                f"stage, {report.experts_moved} of them new: {report.bytes_moved / 1e6:.1f} MB of parameters "
                f"and optimizer states in {report.seconds:.3f} s"
            )
        return report

    def _loads_of_copies(self) -> StageLoads:
        # Expert-parallel groups with copies of the same experts must decide alike. All their loads count, and
        # they plan with the topology of the first one.
        copies, layers = parallel_state.get_expert_data_parallel_group(), self._session.slots.layers
        device = layers[0].local.experts.device
        total = torch.from_numpy(np.stack([layer.history.total_DE() for layer in layers])).to(device)
        dist.all_reduce(total, group=copies)
        nodes = torch.tensor(layers[0].local.context.topology.node_of_device, device=device)
        dist.broadcast(nodes, src=dist.get_global_rank(copies, 0), group=copies)
        topology = Topology(tuple(nodes.tolist()))
        # A group that ran no micro-batches in an iteration knows fewer of them.
        num_known = torch.tensor(len(layers[0].history), device=device)
        dist.all_reduce(num_known, group=copies)
        contexts = [replace(layer.local.context, topology=topology) for layer in layers]
        return StageLoads(contexts, total.cpu().numpy(), max(int(num_known), 1))


def _free_bytes(peak_bytes: int) -> int:
    """Return the free bytes at the peak of an iteration, at which torch has allocated ``peak_bytes``."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return max(0, free + torch.cuda.memory_reserved() - peak_bytes)
    available_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
