"""Asks the strategy for the plans of MoE layers, and divides the planning of an iteration among ranks.

Searches take milliseconds for each layer of a large model, and all ranks of an expert-parallel group have the
same loads. So rank r plans the layers whose index is r modulo the ranks, and one gather shares the plans.
These are always the same layers, because strategies remember their answers for a layer.

Shape letters: T tokens, D devices, E experts.
"""

import pickle
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.gathered_counts import start_counts
from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.collectives.trace_names import traced
from megatron_fssdp.collectives.transfer_lanes import stream_lane
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.runtime.layers.local_layer import LocalLayer
from megatron_fssdp.runtime.slots.remap.reference import sent_to
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.layer_planning import plan_after_gate, plan_before_gate


class LayerPlanner:
    """Plans a layer by its history, alone or ``together`` with the other ranks of its group.

    ``checks_plans`` compares the plans of all ranks before they are used.
    """

    def __init__(self, local: LocalLayer, together: "SharedPlans", *, checks_plans: bool = False) -> None:
        self.local, self._together, self._checks_plans = local, together, checks_plans
        self.planned: LayerPlan | None = None  # of the running iteration, before the gate
        together.layers.append(self)

    @traced("plan")
    def plan_iteration(self, *, is_captured: bool = False) -> LayerPlan:
        """The plan of the running iteration, from the loads of earlier ones.

        For a CUDA graph that is captured, any plan will do where ranks would share theirs.
        """
        if self._together.are_divided and self.lacks_plan:
            if is_captured:  # No message can be captured. Any plan has the same tensors.
                self.planned = self.local.context.owners_only
            else:
                self._together.make(self.local.experts.device)
        plan = self.planned = self.planned or self.plan_alone()
        self._compare(plan)
        return plan

    @property
    def lacks_plan(self) -> bool:
        """Whether the running iteration has loads to plan the layer by, and no plan."""
        return self.planned is None and not self.local.history.is_empty

    def plan_alone(self) -> LayerPlan:
        """What the strategy of this rank plans for the iteration."""
        return plan_before_gate(self.local.strategy, self.local.context, self.local.history)

    def plan_after_gate(
        self, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int | None = None
    ) -> LayerPlan:
        """The plan for the counts of a micro-batch; it serves so many, by default all of the iteration."""
        times = num_micro_batches or max(self.local.clock.num_micro_batches, 1)
        new = plan_after_gate(self.local.strategy, self.local.context, counts_DE, plan, times)
        if new is not plan:
            self._compare(new)
        return new

    def host_counts(self, routing_map: torch.Tensor) -> np.ndarray:
        """Counts of a micro-batch, bool ``[T, E]``, on all devices, int64 ``[D, E]``; the host waits."""
        groups = self.local.groups
        counts = start_counts(routing_map.sum(0), groups.expert_parallel, groups.expert_tensor_parallel)
        counts_DE: np.ndarray = counts.wait().numpy().sum(axis=0)
        return counts_DE

    def _compare(self, plan: LayerPlan) -> None:
        if not self._checks_plans:
            return
        groups, iteration = self.local.groups, self.local.clock.iteration
        what = f"the plan of layer {self.local.context.layer}"
        if iteration is not None:
            what += f" in iteration {iteration}"
        for group in (groups.expert_parallel, groups.expert_tensor_parallel):
            if group is not None:
                check_agreement(plan.digest(), group, what)


class SharedPlans:
    """The layers that a group of ranks plans, on all ranks the same ones in one order.

    Ranks plan for each other if the strategy ``shares_plans``.
    """

    def __init__(self, group: dist.ProcessGroup, *, shares_plans: bool = True) -> None:
        self.layers: list[LayerPlanner] = []
        self._group, self._num_bytes = group, 1 << 12  # enough for small layers
        self._may_divide = shares_plans and group.size() > 1
        self._received: dict[LayerPlanner, tuple[bytes, LayerContext, LayerPlan]] = {}

    @property
    def are_divided(self) -> bool:
        """Whether ranks plan for each other. One layer alone is planned as fast by every rank."""
        return self._may_divide and len(self.layers) > 1

    def make(self, device: torch.device) -> None:
        """Plan all layers of the running iteration that lack a plan; the messages are on ``device``.

        All ranks of the group call it at the same place of the program.

        Raises:
            Exception: What the strategy raised, on whatever rank; every rank raises it.
        """
        rank, size = self._group.rank(), self._group.size()
        lacking = [(index % size, layer) for index, layer in enumerate(self.layers) if layer.lacks_plan]
        own: list[bytes] | Exception
        try:
            own = [packed(layer.plan_alone()) for planner, layer in lacking if planner == rank]
        except Exception as error:  # The others wait for this rank.
            own = error
        by_rank = [pickle.loads(answer) for answer in self._gather(pickle.dumps(own), device)]
        for answer in (own, *by_rank):
            if isinstance(answer, Exception):
                raise answer
        answers = [iter(answer) for answer in by_rank]
        for planner, layer in lacking:
            message, known, context = next(answers[planner]), self._received.get(layer), layer.local.context
            # Plans often stay from one iteration to the next.
            if known is None or known[0] != message or known[1] is not context:
                known = self._received[layer] = message, context, unpacked(message, context)
            layer.planned = known[2]

    def _gather(self, own: bytes, device: torch.device) -> list[bytes]:
        """The messages of all ranks. Their room grows, for all ranks alike, when one of them is longer."""
        on_lane: AbstractContextManager[object] = nullcontext()
        if device.type == "cuda":
            # The host waits only for this message, and not for the optimizer's step.
            on_lane = torch.cuda.stream(stream_lane(self._group, device, "counts").stream)
        while True:
            message = np.zeros(8 + self._num_bytes, np.uint8)
            message[:8] = np.frombuffer(len(own).to_bytes(8, "little"), np.uint8)
            part = np.frombuffer(own[: self._num_bytes], np.uint8)
            message[8 : 8 + len(part)] = part
            with on_lane:
                sent = sent_to(torch.from_numpy(message), device)
                gathered = start_counts(sent, self._group).wait()[0].numpy()
            lengths = gathered[:, :8].copy().view("<i8")[:, 0].tolist()
            if max(lengths) <= self._num_bytes:
                return [row[8 : 8 + size].tobytes() for row, size in zip(gathered, lengths, strict=True)]
            self._num_bytes = 1 << (max(lengths) - 1).bit_length()


def packed(plan: LayerPlan) -> bytes:
    """A plan as a short message, without what all ranks know."""
    rest = [getattr(plan, field.name) for field in fields(plan)[2:]]
    return pickle.dumps((np.packbits(plan.placement.present_ED), plan.transfer.table.astype(np.int32), rest))


def unpacked(message: bytes, context: LayerContext) -> LayerPlan:
    """The plan that a rank has packed for this layer."""
    bits, table, rest = pickle.loads(message)
    shape = context.num_experts, context.num_devices
    present_ED = np.unpackbits(bits, count=shape[0] * shape[1]).reshape(shape).view(np.bool_)
    placement = ExpertPlacement(context.owner_E, present_ED)
    return LayerPlan(placement, TransferPlan(context.num_devices, table), *rest)
