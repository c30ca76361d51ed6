"""What happens between two iterations of a Megatron training: measuring, selecting, re-sharding, replicating.

All of it is collective: all ranks that hold experts of a pipeline stage come here in the same iterations and
decide alike.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fssdp.megatron_adapter.experts.resharding import ExpertResharding, ReshardReport
from megatron_fssdp.megatron_adapter.experts.resident_experts import ResidentExperts
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.megatron_adapter.training.balance_report import BalanceReport
from megatron_fssdp.megatron_adapter.training.memory_report import (
    expert_optimizer,
    held_replicas,
    report_memory,
    reports_for_stage,
)
from megatron_fssdp.megatron_adapter.training.stopped_training import FiniteWatch
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.memory import FP32_BYTES, held_replicas_bytes
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.layer_profiling import profile_layers
from megatron_fssdp.runtime.layers.strategy_selector import StrategySelector
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.selection_report import SelectionReport
from megatron_fssdp.strategies.strategy import (
    MovesOwners,
    ResidentReplicas,
    SelectsStrategies,
    mistakes_named,
)
from megatron_fssdp.strategies.token_travel import exchange_seconds

logger = logging.getLogger(__name__)


class IterationDriver:
    """Begins and ends the iterations of one training under a strategy.

    :meth:`begin` measures, or lets ``auto`` select, then re-shards owners or changes resident replicas.
    :meth:`end`, after the optimizer step, collects what each layer did. The replicas' sums of gradients are
    reset wherever Megatron resets those of its model chunks.

    Attributes:
        runtime: Runtime of the model's MoE layers.
        held: How many replicas exist at the same time on this rank.
        reshard: What was moved before the running iteration, if anything was.
        selection: What ``auto`` selected before the running iteration, if it reconsidered.
        balance: What the log says about the loads; ``None`` on ranks that do not log for their stage.

    Raises:
        ConfigurationError: Owners shall move or replicas be resident, and slots cannot be exchanged.
    """

    def __init__(
        self, session: StrategySession, name: str, model: Sequence[Any], optimizer: Any, args: Any
    ) -> None:
        self._session, self._optimizer, self._args = session, optimizer, args
        self.runtime = session.runtime
        self.held = held_replicas(session, model, args)
        self.reshard: ReshardReport | None = None
        self.selection: SelectionReport | None = None
        self._iterations_to_measure = self._measured_replicas_bytes = 0
        self._began_s = 0.0
        self._selector: StrategySelector | None = None
        self._residents: ResidentExperts | None = None
        self._told_exchange: set[int] = set()
        for chunk in model:
            chunk.zero_grad_buffer = self._resetting(chunk.zero_grad_buffer)
        # Megatron turns this check off for fp16, where loss scaling makes non-finite numbers normal.
        self._watch = FiniteWatch(model) if args.check_for_nan_in_loss_and_grad else None
        layers, strategy = self.runtime.layers, session.strategy
        self.balance = BalanceReport(layers, name) if reports_for_stage() else None
        copies = parallel_state.get_expert_data_parallel_group()
        if strategy.resident_slots and args.expert_model_parallel_size > 1:
            slots = strategy.resident_slots
            self._residents = ResidentExperts(session.slots, slots, model, optimizer, copies)
        if not layers or layers[0].context.num_devices == 1:
            return
        if strategy.moves_owners:
            owned, devices = session.slots.parameters, layers[0].groups.expert_parallel
            resharding = ExpertResharding(owned, devices, copies, model, optimizer)
            resharding.quantities()  # A run whose slots cannot be exchanged should fail now.
            session.slots.resharding = resharding
        if isinstance(strategy, SelectsStrategies) and session.slots.layers:
            self._selector = StrategySelector(strategy, self._groups_of_owners, self._device)
        self._iterations_to_measure = strategy.profile_iterations
        if self._iterations_to_measure:
            for layer in layers:
                layer.stopwatch = LayerStopwatch()
        else:  # Until costs are measured, there are no limits, and no replicas.
            report_memory(session, args, self.held)

    @property
    def _groups_of_owners(self) -> list[dist.ProcessGroup]:
        """The groups over which ranks agree if they must have equal plans or share owners."""
        return [
            self.runtime.layers[0].groups.expert_parallel,
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_data_parallel_group(),
        ]

    @property
    def _device(self) -> torch.device:
        # After a re-shard, this rank may own no expert of a layer, but it owns experts of some layer.
        layers = self.runtime.layers
        return next(ps[0].device for layer in layers for ps in layer.experts.parameters.values())

    def begin(self, iteration: int, num_micro_batches: int) -> None:
        """Prepare the iteration after ``iteration`` complete ones, before its first forward pass."""
        session = self._session
        if self._watch is not None:
            self._watch.clear()
        if self._iterations_to_measure:
            self._iterations_to_measure -= 1
        elif self.runtime.layers and self.runtime.layers[0].stopwatch is not None:
            self._profile(num_micro_batches)
        self.selection = None
        if self._selector is not None:
            # Layers of multi-token prediction keep their strategy.
            self.selection = self._selector.select(session.slots.layers, iteration)
        if self.selection is not None and reports_for_stage():
            for line in self.selection.describe():
                logger.info(f"[fssdp] auto, after iteration {iteration}: {line}")
        self.reshard = self._moved(iteration)
        session.runtime.begin_iteration(num_micro_batches, iteration + 1)
        self._began_s = time.perf_counter()

    def _resetting(self, zero_gradients: Callable[[], None]) -> Callable[[], None]:
        """Wrap a model chunk's ``zero_grad_buffer``. After the first one, others find nothing to do."""

        @wraps(zero_gradients)
        def zero_all_gradients() -> None:
            zero_gradients()
            if self._residents is not None:
                self._residents.zero_gradients()
            self.runtime.reset_gradients()

        return zero_all_gradients

    def end(self) -> list[LayerLoad]:
        """End an iteration after the optimizer step, and return what each layer did."""
        if self._selector is not None:
            self._selector.note(time.perf_counter() - self._began_s)
        if self._session.strategy.travel.exchange == "by_price":
            self._tell_exchange()
        plans = [layer.plan for layer in self.runtime.layers]
        loads = self.runtime.end_iteration()
        if self.balance is not None:
            number, seconds = self._args.curr_iteration + 1, time.perf_counter() - self._began_s
            is_logged = number % self._args.log_interval == 0
            self.balance.note(number, plans, loads, seconds, is_logged=is_logged)
        if any(layer.stopwatch is not None for layer in self.runtime.layers):
            self._measured_replicas_bytes = max(self._measured_replicas_bytes, self._replicas_bytes(loads))
        return loads

    def _tell_exchange(self) -> None:
        """Log the layers whose tokens have travelled by the deduplicated exchange for the first time."""
        runtime, numbers, megatron_s, deduplicated_s = self.runtime, list[int](), 0.0, 0.0
        for layer in runtime.layers:
            number, plan = layer.context.layer, layer.plan
            if plan is None or not plan.deduplicated or number in self._told_exchange:
                continue
            numbers.append(number)
            if priced := exchange_seconds(layer.context, layer.history, plan):
                megatron_s += priced.megatron_s
                deduplicated_s += priced.deduplicated_s
        self._told_exchange.update(numbers)
        if numbers and reports_for_stage():
            logger.info(
                f"[fssdp] exchange by price, iteration {runtime.clock.iteration}: layers "
                f"{', '.join(map(str, numbers))} send each token once to a node; modelled seconds "
                f"{deduplicated_s:.4g} instead of {megatron_s:.4g}"
            )

    def _replicas_bytes(self, loads: Sequence[LayerLoad]) -> int:
        """Bytes that an iteration's replicas took on this rank."""
        first = self.runtime.layers[0]
        layout, device = first.experts.layout(), first.groups.device
        return held_replicas_bytes(
            [int(one.replicas_per_device_D[device]) for load in loads for one in load.placements],
            expert_bytes=layout.num_bytes,
            gradient_bytes_per_expert=layout.numel * FP32_BYTES,
            held=self.held,
        )

    def report_non_finite(self) -> None:
        """Log where NaN or infinity appeared first, if Megatron ends the run because of them."""
        if self._watch is not None:
            self._watch.report(self._args)

    def _profile(self, num_micro_batches: int) -> None:
        layers = self.runtime.layers
        layout = layers[0].experts.layout()
        copies, optimizer = parallel_state.get_expert_data_parallel_group(), expert_optimizer(self._args)
        profile_layers(
            layers,
            self._groups_of_owners,
            free_bytes=_free_bytes(self._measured_replicas_bytes),
            token_bytes=self._args.hidden_size * layout.dtype.itemsize,
            owned_bytes=optimizer.owned_bytes(layout.numel, layout.dtype.itemsize, copies.size()),
            num_micro_batches=num_micro_batches,
            held=self.held,
            device=self._device,
            choices=TokenChoices(self._args.moe_router_topk),
            deduplicated=self._session.strategy.travel.exchange == "deduplicated",
        )
        context, strategy = layers[0].context, self._session.strategy
        if reports_for_stage():
            profile = context.profile
            assert profile is not None
            cluster = profile.cluster
            intra, inter = (
                f"{link.alpha_s * 1e6:.0f} us + {1e-9 / link.beta_s_per_byte:.2f} GB/s"
                for link in (cluster.intra, cluster.inter)
            )
            logger.info(
                f"[fssdp] measured in {strategy.profile_iterations} iterations: compute before a layer "
                f"{profile.non_moe_s * 1e3:.3f} ms, links inside a node {intra}, between nodes {inter}, "
                f"experts {cluster.expert_flops_per_s / 1e9:.2f} GFLOP/s per device, "
                f"{profile.expert_bytes} bytes per expert; {strategy.limits(context)}"
            )
        report_memory(self._session, self._args, self.held)

    def _moved(self, iteration: int) -> ReshardReport | None:
        """Reconsider owners or resident replicas if this iteration is one at which the strategy does so."""
        strategy = self._session.strategy
        if isinstance(strategy, MovesOwners) and strategy.moves_owners and strategy.reshards_at(iteration):
            return self._reshard(strategy)
        if isinstance(strategy, ResidentReplicas) and strategy.replicates_at(iteration):
            return self._replicate(strategy)
        return None

    def _reshard(self, strategy: MovesOwners) -> ReshardReport | None:
        slots = self._session.slots
        layers = slots.layers
        if not layers or layers[0].context.num_devices == 1:
            return None
        old, load_LE = slots.owners, self._mean_loads().sum(axis=1)
        with mistakes_named(strategy, "reshard"):
            new = strategy.reshard(self._contexts_of_copies(), load_LE, old)
        return slots.move_to(new)

    def _replicate(self, strategy: ResidentReplicas) -> ReshardReport | None:
        if self._residents is None or not self._session.slots.layers:
            return None
        contexts, load_LDE = self._contexts_of_copies(), self._mean_loads()
        with mistakes_named(strategy, "replicate"):
            placements = [strategy.replicate(*one) for one in zip(contexts, load_LDE, strict=True)]
        report = self._residents.hold(placements)
        if report is not None and reports_for_stage():
            logger.info(
                f"[fssdp] resident replicas: {sum(one.num_replicas for one in placements)} on this pipeline "
                f"stage, {report.experts_moved} of them new: {report.bytes_moved / 1e6:.1f} MB of parameters "
                f"and optimizer states in {report.seconds:.3f} s"
            )
        return report

    # Expert-parallel groups with copies of the same experts must decide alike. All their loads count, and
    # they plan with the topology of the first one and the latest jump of any.

    def _mean_loads(self) -> np.ndarray:
        """Return the mean loads per iteration over the expert-data-parallel copies, ``[L, D, E]``."""
        copies, layers = parallel_state.get_expert_data_parallel_group(), self._session.slots.layers
        total = torch.from_numpy(np.stack([layer.history.total_DE() for layer in layers])).to(self._device)
        dist.all_reduce(total, group=copies)
        mean_LDE: np.ndarray = total.cpu().numpy() / (max(len(layers[0].history), 1) * copies.size())
        return mean_LDE

    def _contexts_of_copies(self) -> list[LayerContext]:
        """Return the contexts of all layers, equal on all expert-data-parallel copies."""
        layers = self._session.slots.layers
        copies = parallel_state.get_expert_data_parallel_group()
        nodes = torch.tensor(layers[0].context.topology.node_of_device, device=self._device)
        dist.broadcast(nodes, src=dist.get_global_rank(copies, 0), group=copies)
        topology = Topology(tuple(nodes.tolist()))
        num_known = len(layers[0].history)
        since_L = [layer.history.num_since_jump for layer in layers]
        settled_L = torch.tensor([num_known if n is None else n for n in since_L], device=self._device)
        dist.all_reduce(settled_L, op=dist.ReduceOp.MIN, group=copies)
        return [
            replace(layer.context, topology=topology, num_since_jump=n if n < num_known else None)
            for layer, n in zip(layers, settled_L.tolist(), strict=True)
        ]


def _free_bytes(replicas_bytes: int) -> int:
    """Return the free bytes at the peak of an iteration, which has ``replicas_bytes``, without replicas."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_allocated() - replicas_bytes
        return max(0, free + torch.cuda.memory_reserved() - peak)
    available_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
