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

from megatron_fssdp.collectives.all_ranks import check_agreement
from megatron_fssdp.collectives.gathered_counts import start_counts
from megatron_fssdp.collectives.trace_names import traced
from megatron_fssdp.collectives.transfer_lanes import stream_lane
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.runtime.layers.local_layer import LocalLayer
from megatron_fssdp.runtime.slots.remap.reference import sent_to
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.layer_planning import plan_after_gate, plan_before_gate


class LayerPlanner:
    """Plans the layers of a group of ranks, which are the same on all of them, in one order.

    Ranks plan for each other if the strategy ``shares_plans``. One layer alone is planned as fast by every
    rank. ``checks_plans`` compares the plans of all ranks before they are used.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, shares_plans: bool = True, checks_plans: bool = False
    ) -> None:
        self.layers: list[LocalLayer] = []
        self._group, self._num_bytes = group, 1 << 12  # enough for small layers
        self._may_divide, self._checks_plans = shares_plans and group.size() > 1, checks_plans
        self._planned: dict[LocalLayer, LayerPlan] = {}  # of the running iteration, before the gate
        self._received: dict[LocalLayer, tuple[bytes, LayerContext, LayerPlan]] = {}

    @traced("plan")
    def plan_iteration(self, layer: LocalLayer, *, is_captured: bool = False) -> LayerPlan:
        """The plan of the running iteration, from the loads of earlier ones.

        For a CUDA graph that is captured, any plan will do where ranks would share theirs.
        """
        if self._may_divide and len(self.layers) > 1 and self._lacks_plan(layer):
            if is_captured:  # No message can be captured. Any plan has the same tensors.
                self._planned[layer] = layer.context.owners_only
            else:
                self._plan_together(layer.experts.device)
        if layer not in self._planned:
            self._planned[layer] = _plan_alone(layer)
        self._compare(layer, self._planned[layer])
        return self._planned[layer]

    def plan_after_gate(
        self, layer: LocalLayer, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int | None = None
    ) -> LayerPlan:
        """The plan for the counts of a micro-batch; it serves so many, by default all of the iteration."""
        profile = layer.context.profile
        expected = layer.clock.num_micro_batches or (profile.num_micro_batches if profile else 1)
        times = num_micro_batches or expected
        new = plan_after_gate(layer.strategy, layer.context, counts_DE, plan, times)
        if new is not plan:
            self._compare(layer, new)
        return new

    def forget(self, layer: LocalLayer) -> None:
        """Forget the plan of the running iteration."""
        self._planned.pop(layer, None)

    def _lacks_plan(self, layer: LocalLayer) -> bool:
        return layer not in self._planned and not layer.history.is_empty

    def _compare(self, layer: LocalLayer, plan: LayerPlan) -> None:
        if not self._checks_plans:
            return
        subject, iteration = f"the plan of layer {layer.context.layer}", layer.clock.iteration
        if iteration is not None:
            subject += f" in iteration {iteration}"
        peers = layer.groups.expert_tensor_parallel
        check_agreement(plan.digest(), subject, layer.groups.expert_parallel, *filter(None, [peers]))

    def _plan_together(self, device: torch.device) -> None:
        """Plan all layers of the running iteration that have loads and no plan.

        All ranks of the group call it at the same place of the program, and all raise what the strategy
        raised on any of them.
        """
        rank, size = self._group.rank(), self._group.size()
        lacking = [
            (index % size, layer) for index, layer in enumerate(self.layers) if self._lacks_plan(layer)
        ]
        own: list[bytes] | Exception
        try:
            own = [packed(_plan_alone(layer)) for planner, layer in lacking if planner == rank]
        except Exception as error:  # The others wait for this rank.
            own = error
        try:
            message = pickle.dumps(own)
        except Exception:  # An error may hold anything.
            message = pickle.dumps(RuntimeError(repr(own)))
        by_rank = [pickle.loads(answer) for answer in self._gather(message, device)]
        for answer in (own, *by_rank):
            if isinstance(answer, Exception):
                raise answer
        answers = [iter(answer) for answer in by_rank]
        for planner, layer in lacking:
            plan, known, context = next(answers[planner]), self._received.get(layer), layer.context
            # Plans often stay from one iteration to the next.
            if known is None or known[0] != plan or known[1] is not context:
                known = self._received[layer] = plan, context, unpacked(plan, context)
            self._planned[layer] = known[2]

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


def _plan_alone(layer: LocalLayer) -> LayerPlan:
    return plan_before_gate(layer.strategy, layer.context, layer.history)


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
