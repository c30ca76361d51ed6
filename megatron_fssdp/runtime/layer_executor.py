"""Executes a strategy's plans for one MoE layer.

Shape legend: T tokens of this rank, D devices, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.collectives.sparse_collectives import SparseTransfer
from megatron_fssdp.collectives.uneven_all_to_all import gather_counts
from megatron_fssdp.planning.load_history import LoadHistory
from megatron_fssdp.planning.replica_routing import cross_node_tokens, device_tokens_D
from megatron_fssdp.runtime.expert_groups import ExpertGroups
from megatron_fssdp.runtime.expert_layout import ExpertLayout
from megatron_fssdp.runtime.materialization import Materialization
from megatron_fssdp.runtime.token_exchange import DispatchRecord, plan_exchange
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan, Strategy

# Small enough that node leaders forward the first chunk early, large enough that a
# message's fixed cost does not count.
_CHUNK_BYTES = 1 << 20


@dataclass
class IterationClock:
    """Who ends iterations, the same for all layers of a model.

    Attributes:
        driven: Whether a training loop marks them. Without one, each backward pass counts
            as an iteration, so that a layer in somebody's own loop balances as well. A loop
            with several micro-batches in flight and non-reentrant activation recompute needs
            the marks: there the plan must not change between a forward and its recomputation.
    """

    driven: bool = False


@dataclass
class LayerLoad:
    """What one layer did in one iteration, summed over its micro-batches and all its devices.

    Attributes:
        layer: Megatron's layer number.
        counts_DE: int64 (token, k) pairs by source device and expert.
        owner_D: int64 pairs each device would compute under plain expert parallelism.
        device_D: int64 pairs each device computed under the placement used.
        num_replicas: Replicas in the last plan.
        spag_bytes: Bytes that SparseAllGather moved between devices.
        sprs_bytes: Bytes that SparseReduceScatter moved between devices.
        cross_node_tokens: Pairs dispatched to another node.
    """

    layer: int
    counts_DE: np.ndarray
    owner_D: np.ndarray
    device_D: np.ndarray
    num_replicas: int = 0
    spag_bytes: int = 0
    sprs_bytes: int = 0
    cross_node_tokens: int = 0

    @staticmethod
    def empty(layer: int, num_devices: int, num_experts: int) -> "LayerLoad":
        """A load of nothing yet."""
        return LayerLoad(
            layer,
            np.zeros((num_devices, num_experts), np.int64),
            np.zeros(num_devices, np.int64),
            np.zeros(num_devices, np.int64),
        )


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward pass through the layer: its exchange and its weights."""

    exchange: DispatchRecord
    materialization: Materialization


@dataclass(eq=False)
class LayerExecutor:
    """One MoE layer on this rank: asks the strategy, keeps the loads, starts micro-batches.

    Attributes:
        context: What the strategy may know of the layer.
        groups: Process group and topology.
        parameters: Parameters of each expert this rank owns, by expert, in the order of
            :class:`ExpertWeights`. The tensors stay Megatron's own.
        strategy: Decides.
        clock: Who ends iterations.
        layout: Shapes of one expert's tensors; by default those of this rank's parameters.
            A rank that owns no expert of the layer has to be told.
        measure: Whether to work out the device loads that reports show; they cost a
            little host time per micro-batch.
        check_plans: Compare the plans of all ranks before using them.
    """

    context: LayerContext
    groups: ExpertGroups
    parameters: Mapping[int, Sequence[torch.nn.Parameter]]
    strategy: Strategy
    clock: IterationClock = field(default_factory=IterationClock)
    layout: ExpertLayout | None = None
    measure: bool = False
    check_plans: bool = False
    history: LoadHistory = field(init=False)
    load: LayerLoad = field(init=False)
    _plan: LayerPlan | None = field(init=False, default=None)
    _transfer: SparseTransfer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        shape = (self.context.num_devices, self.context.num_experts)
        self.history = LoadHistory(self.strategy.window, *shape)
        self.load = LayerLoad.empty(self.context.layer, *shape)
        owned = tuple(np.flatnonzero(self.context.owner_E == self.groups.device).tolist())
        if tuple(self.parameters) != owned:
            raise ValueError(
                f"layer {self.context.layer}: got parameters of experts {tuple(self.parameters)}, "
                f"wanted those this rank owns, {owned}"
            )
        self._layout_of_all()

    def renumber(self, layer: int) -> None:
        """Take the layer number that the model assigns after building its layers."""
        self.context = replace(self.context, layer=layer)
        self.load.layer = layer

    def prepare(self) -> LayerPlan:
        """The plan of the running iteration, made from the iterations before it.

        Frozen until the iteration ends, so that every micro-batch and a recomputed
        forward use the same placement.
        """
        if self._plan is None:
            plan = self.strategy.before_gate(self.context, self.history)
            if self.check_plans:
                check_agreement(
                    plan.placement.digest(),
                    self.groups.expert_parallel,
                    f"the placement of layer {self.context.layer}",
                )
            self._plan = plan
            self._transfer = None
        return self._plan

    def begin_micro_batch(self, routing_map: torch.Tensor) -> MicroBatch:
        """Exchange the counts and work out where this micro-batch's rows go.

        Args:
            routing_map: bool ``[T, E]`` assignments of this rank's tokens.
        """
        plan = self.prepare()
        counts = gather_counts(routing_map.sum(dim=0), self.groups.expert_parallel)
        counts_DE = counts.cpu().numpy()
        exchange = plan_exchange(
            routing_map, counts_DE, plan.placement, self.groups.topology, self.groups.device
        )
        layout = self._layout_of_all()
        transfer = self._transfer_of(plan, layout, routing_map.device)
        bytes_moved = plan.transfer.total_bytes(layout.num_bytes)
        self.load.num_replicas = plan.placement.num_replicas
        self.load.spag_bytes += bytes_moved

        def finished() -> None:
            self._count(counts_DE, plan, bytes_moved)

        return MicroBatch(
            exchange,
            Materialization(plan.placement, self.groups.device, layout, self.parameters, transfer, finished),
        )

    def end_iteration(self) -> LayerLoad:
        """Close the iteration: its counts become history, its plan is dropped."""
        load = self.load
        if load.counts_DE.any():
            self.history.append(load.counts_DE)
        self.load = LayerLoad.empty(self.context.layer, *load.counts_DE.shape)
        self._plan = None
        self._transfer = None
        return load

    def _layout_of_all(self) -> ExpertLayout:
        # Asked anew each time: a model may be converted to another dtype after it is built.
        layouts = {ExpertLayout.of(tensors) for tensors in self.parameters.values()}
        if self.layout is not None:
            layouts.add(self.layout)
        if len(layouts) != 1:
            raise ValueError(
                f"layer {self.context.layer}: got {len(layouts)} expert layouts "
                f"{sorted(map(str, layouts))}, wanted one for all experts; a rank that owns none of them "
                "needs the layout argument"
            )
        return layouts.pop()

    def _transfer_of(self, plan: LayerPlan, layout: ExpertLayout, device: torch.device) -> SparseTransfer:
        if self._transfer is None:
            self._transfer = SparseTransfer(
                self.groups.expert_parallel,
                plan.transfer,
                num_elements=layout.numel,
                dtype=layout.dtype,
                device=device,
                chunk_bytes=_CHUNK_BYTES,
            )
        return self._transfer

    def _count(self, counts_DE: np.ndarray, plan: LayerPlan, bytes_moved: int) -> None:
        load = self.load
        load.counts_DE += counts_DE
        load.sprs_bytes += bytes_moved
        if self.measure:
            placement, topology = plan.placement, self.groups.topology
            load.device_D += device_tokens_D(counts_DE, placement, topology)
            load.owner_D += np.bincount(
                self.context.owner_E, weights=counts_DE.sum(axis=0), minlength=topology.num_devices
            ).astype(np.int64)
            load.cross_node_tokens += cross_node_tokens(counts_DE, placement, topology)
        if not self.clock.driven:
            self.end_iteration()
