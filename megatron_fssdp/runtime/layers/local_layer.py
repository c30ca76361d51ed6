"""What a rank knows of one MoE layer, the clock of iterations, and the layer's transfers between ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.transfer_lanes import TransferTimer
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.transfer.message_size import MessageRule, message_rule
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.clocks.pass_timer import PassTimer
from megatron_fssdp.runtime.experts.expert_layout import LocalExperts
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.strategy import Strategy


@dataclass
class IterationClock:
    """State of the running iteration, shared by all layers of a model.

    It is ``driven`` in an iteration and in an evaluation outside of iterations. Other passes compute with
    owners alone.
    """

    is_open: bool = False  # An iteration has begun.
    driven: bool = False
    trains: bool = False  # Passes are counted; false in an evaluation, also inside of an iteration.
    num_micro_batches: int = 0  # announced so far; a hint, 0 if nobody announced any
    iteration: int | None = None  # number in the loop's log, for messages


@dataclass(eq=False)
class LocalLayer:
    """A layer on this rank, to which all of its parts refer. But for loads, it changes between iterations."""

    context: LayerContext  # what the strategy may know of the layer
    groups: ExpertGroups
    experts: LocalExperts  # with Parameters on this rank
    strategy: Strategy
    clock: IterationClock = field(default_factory=IterationClock)
    timer: PassTimer = field(default_factory=PassTimer)
    is_first: bool = True  # The model chunk has no MoE layer before this one.
    # Transfers of the running iteration. None if this rank does not keep what reports show.
    journal: list[TransferTimer] | None = None
    stopwatch: LayerStopwatch | None = None  # while costs are measured

    def __post_init__(self) -> None:
        self.strategy.check(self.context)
        self.experts.layout()  # Refuses experts of several shapes.
        context = self.context
        self.history = LoadHistory(self.strategy.window, context.num_devices, context.num_experts)
        self.load = LayerLoad.empty(context)  # of the running iteration

    def set_profile(self, profile: LayerProfile) -> None:
        """Set the costs of the layer, equal on all ranks that plan together."""
        self.context, self.stopwatch = replace(self.context, profile=profile), None

    @property
    def messages(self) -> MessageRule:
        """How transfers are divided. Equal on all ranks: they get a profile between the same iterations."""
        profile = self.context.profile
        return profile.messages if profile else message_rule(on_cuda=self.experts.device.type == "cuda")

    def bind(
        self, plan: TransferPlan, sizes: Sequence[int], dtype: torch.dtype, elements: range | None = None
    ) -> SparseTransfer:
        """Bind a transfer plan, for experts of tensors of these sizes, to the layer's process group."""
        return SparseTransfer(
            self.groups.transfers or self.groups.expert_parallel,
            plan,
            sizes=sizes,
            elements=elements,
            dtype=dtype,
            device=self.experts.device,
            messages=self.messages,
            is_far=plan.crosses_nodes(self.context.topology),
            one_queue=self.groups.one_queue,
            journal=self.journal,
            name=self.experts.name,
        )
