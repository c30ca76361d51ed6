"""Divides the planning of an iteration among ranks: each plans some layers, and one gather shares the plans.

Searches take milliseconds for each layer of a large model, and all ranks of an expert-parallel group have the
same loads. So rank r plans the layers whose index is r modulo the ranks. These are always the same layers,
because strategies remember their answers for a layer.
"""

import pickle
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.gathered_counts import start_counts
from megatron_fssdp.collectives.transfer_lanes import stream_lane
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.runtime.slots.remap.reference import sent_to
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan

if TYPE_CHECKING:
    from megatron_fssdp.runtime.layers.planned_layer import PlannedLayer


class SharedPlans:
    """The layers of a group of ranks that plan them together; all ranks have the same ones in one order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.layers: list[PlannedLayer] = []
        self._group, self._num_bytes = group, 1 << 12  # enough for small layers

    def make(self, first: "PlannedLayer") -> None:
        """Plan a layer, and with it all others of the running iteration that lack a plan.

        All ranks of the group call it at the same place of the program.

        Raises:
            Exception: What the strategy raised, on whatever rank; every rank raises it.
        """
        layers = [layer for layer in self.layers if layer.lacks_plan]
        rank, size = self._group.rank(), self._group.size()
        own: list[bytes] | Exception
        try:
            mine = (layer for layer in layers if self.layers.index(layer) % size == rank)
            own = [packed(layer.plan_alone()) for layer in mine]
        except Exception as error:  # The others wait for this rank.
            own = error
        by_rank = [pickle.loads(one) for one in self._gather(pickle.dumps(own), first.experts.device)]
        for answer in (own, *by_rank):
            if isinstance(answer, Exception):
                raise answer
        answers = [iter(answer) for answer in by_rank]
        for layer in layers:
            layer.take_plan(next(answers[self.layers.index(layer) % size]))

    def _gather(self, own: bytes, device: torch.device) -> list[bytes]:
        """The messages of all ranks. Their room grows, for all ranks alike, when one of them is longer."""
        on_lane: AbstractContextManager[Any] = nullcontext()
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
                return [one[8 : 8 + length].tobytes() for one, length in zip(gathered, lengths, strict=True)]
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
