"""Divides the planning of an iteration among ranks: each plans some layers, and one gather shares the plans.

Searches take milliseconds for each layer of a large model, and all ranks of an expert-parallel group have the
same loads. So rank r plans the layers whose index is r modulo the ranks. These are always the same layers,
because strategies remember their answers for a layer.
"""

import pickle
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.gathered_counts import start_counts
from megatron_fssdp.collectives.transfer_lanes import stream_lane
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.runtime.layers.local_layer import LocalLayer
from megatron_fssdp.runtime.slots.remap.reference import sent_to
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan


class SharedPlans:
    """The layers that a group of ranks has, on all ranks the same ones in one order.

    Ranks plan for each other if the strategy ``shares_plans``.
    """

    def __init__(self, group: dist.ProcessGroup, *, shares_plans: bool = True) -> None:
        self.layers: list[LocalLayer] = []
        self._group, self._num_bytes = group, 1 << 12  # enough for small layers
        self._may_divide = shares_plans and group.size() > 1
        self._received: dict[LocalLayer, tuple[bytes, LayerContext, LayerPlan]] = {}

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
            own = [packed(layer.plan_before_gate()) for planner, layer in lacking if planner == rank]
        except Exception as error:  # The others wait for this rank.
            own = error
        by_rank = [pickle.loads(answer) for answer in self._gather(pickle.dumps(own), device)]
        for answer in (own, *by_rank):
            if isinstance(answer, Exception):
                raise answer
        answers = [iter(answer) for answer in by_rank]
        for planner, layer in lacking:
            message, known = next(answers[planner]), self._received.get(layer)
            # Plans often stay from one iteration to the next.
            if known is None or known[0] != message or known[1] is not layer.context:
                known = self._received[layer] = message, layer.context, unpacked(message, layer.context)
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
