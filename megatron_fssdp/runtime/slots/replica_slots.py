"""The replica slots of one layer on this device: Parameters with fixed names, whose memory comes and goes.

A slot is a place for one expert's weights. Owned slots hold the Parameters that Megatron registered; they
stay in autograd and in Megatron's DDP. Replica slots have Parameters of their own::

    slot        0        1        2            3
                owned    owned    replica 0    replica 1
    weights     Megatron's        [numel] each, in the experts' data type; memory while an expert is here
    gradients   main_grad         [trained_numel] each, in fp32, or the    memory from a backward pass until
                                  experts' data type for a single pass     the sums have reached the owners

The Parameters are made once, so the experts' module can be bound to them once. Only their storage is given
back and taken again. A tensor that autograd saved stays valid in this way, because it is the Parameter
itself. Layers take and give back blocks of equal sizes on one stream, so torch's allocator lends the same
memory to all layers whose replicas live for a pass.

On CUDA, autograd adds to the sums on the stream of the experts' forward pass. Megatron's DDP keeps autograd's
nodes of owned experts, and with them their stream, from one graph to the next; nothing keeps these.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.planning.memory import ADDED_BYTES
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertParameters
from megatron_fssdp.runtime.slots.node_slots import SlotRoom


class ReplicaSlots:
    """Replica slots with the weights and the gradient sums of the experts that they hold.

    If some of a layer's experts are frozen, only their owners know, and they drop the gradients of replicas.
    The weights can be in a ``room``, whose memory stays; their users take it.
    """

    def __init__(self, layout: ExpertLayout, device: torch.device, room: SlotRoom | None = None) -> None:
        self.layout, self.device, self.room = layout, device, room
        self._slots: list[_Slot] = []
        self._slot_of: dict[int, _Slot] = {}
        self._made = _MadeGradients()

    def hold(self, experts: Iterable[int], sums: torch.dtype | None = None) -> None:
        """Set which experts the slots hold, and the data type of their gradient sums, which must be closed.

        An expert that stays keeps its slot and its weights. In a room, slots follow from the experts instead.
        By default, sums are in fp32 or wider.
        """
        wanted, dtype = sorted(experts), sums or accumulation_dtype(self.layout.dtype)
        # A host's torch.autocast keeps casts by Parameter, and does not see that it holds another expert.
        torch.clear_autocast_cache()
        if self.room is not None:
            self._slot_of.clear()
        for expert in self._slot_of.keys() - wanted:
            self._slot_of.pop(expert).weights.give_back()
        free = iter([slot for slot in self._slots if slot not in self._slot_of.values()])
        for expert in wanted:
            if expert not in self._slot_of:
                self._slot_of[expert] = next(free, None) or self._new_slot()
            slot = self._slot_of[expert]
            slot.sums.flat, gradients = slot.gradients[dtype]
            for parameter, gradient in zip(slot.parameters, gradients, strict=False):
                # The name under which Megatron's layers and Transformer Engine look for a gradient's place.
                parameter.main_grad = gradient
        self._made.num_wanted = len(wanted) * self.layout.num_trained

    @property
    def experts(self) -> tuple[int, ...]:
        """The experts that the slots hold, ascending."""
        return tuple(sorted(self._slot_of))

    def parameters(self, expert: int) -> ExpertParameters:
        """The Parameters of an expert's slot."""
        return self._slot_of[expert].parameters

    @property
    def held_bytes(self) -> int:
        """Memory that weights and gradient sums occupy now, in bytes; in a room, all of it."""
        return sum(slot.weights.storage.nbytes() + slot.sums.storage.nbytes() for slot in self._slots)

    def open_weights(self) -> None:
        """Take the memory of the weights of all held experts; those that have it keep their contents."""
        for slot in self._slot_of.values():
            slot.weights.take()

    def weights(self) -> dict[int, torch.Tensor]:
        """Flat weights ``[numel]`` by expert, for writing; their memory must be open."""
        return {expert: slot.weights.flat for expert, slot in self._slot_of.items()}

    def close_weights(self) -> None:
        """Give back the memory of all weights."""
        for slot in self._slots:
            slot.weights.give_back()

    def open_sums(self) -> None:
        """Take the memory of the gradient sums, with zeros; sums that are open keep their contents."""
        if new := [slot.sums.flat for slot in self._slot_of.values() if slot.sums.take()]:
            torch._foreach_zero_(new)

    def add_gradients(self) -> None:
        """Add to the sums what a backward pass has made for some of the slots only."""
        self._made.add()

    def sums(self) -> dict[int, torch.Tensor]:
        """Flat gradient sums ``[trained_numel]`` by expert; their memory must be open."""
        self.add_gradients()
        return {expert: slot.sums.flat for expert, slot in self._slot_of.items()}

    def close_sums(self) -> None:
        """Give back the memory of all gradient sums."""
        self._made.drop()
        for slot in self._slots:
            slot.sums.give_back()

    def _new_slot(self) -> "_Slot":
        layout, room = self.layout, self.room
        if room is None:
            flat = torch.empty(layout.numel, dtype=layout.dtype, device=self.device)
        else:
            flat = room.slots[len(self._slots)]
        wide = accumulation_dtype(layout.dtype)
        total = torch.empty(layout.trained_numel, dtype=wide, device=self.device)
        flats = {dtype: total.view(dtype)[: layout.trained_numel] for dtype in (layout.dtype, wide)}
        gradients = {dtype: (sums, layout.unpack(sums)) for dtype, sums in flats.items()}
        made = []
        for number, weight in enumerate(layout.unpack(flat)):
            parameter: Any = torch.nn.Parameter(weight, requires_grad=number < layout.num_trained)
            parameter.allreduce = parameter.grad_added_to_main_grad = False
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._made.note)
            made.append(parameter)
        # .data has a version counter of its own, so autograd does not see a refilled weight as a change.
        weights = _Memory(flat.data, stays=room is not None)
        self._slots.append(_Slot(tuple(made), weights, _Memory(total), gradients))
        return self._slots[-1]


@dataclass(eq=False)
class _Slot:
    parameters: tuple[Any, ...]
    weights: "_Memory"
    sums: "_Memory"
    # The sums by data type, in one memory: flat, and in the shapes of the Parameters.
    gradients: dict[torch.dtype, tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


class _Memory:
    """A flat tensor whose memory comes and goes; at first it has none. If it ``stays``, its user does."""

    def __init__(self, flat: torch.Tensor, *, stays: bool = False) -> None:
        self.flat, self.storage, self._stays = flat, flat.untyped_storage(), stays
        self.give_back()

    def take(self) -> bool:
        """Take the memory, and return whether there was none."""
        # A resize to the same size would move the contents, which a transfer may be writing.
        is_new = not self.storage.nbytes()
        if is_new:
            self.storage.resize_(self.flat.nbytes)
        return is_new

    def give_back(self) -> None:
        if not self._stays:
            self.storage.resize_(0)


class _MadeGradients:
    """Gradients of a backward pass that are not in the sums yet. One kernel adds those of many slots."""

    def __init__(self) -> None:
        self.num_wanted = 0  # Parameters of all held experts
        self.drop()

    def drop(self) -> None:
        self._pairs: dict[Any, torch.Tensor] = {}
        self._num_bytes = 0
        self._are_first = True  # The sums are zeros wherever these gradients belong.

    def note(self, parameter: Any) -> None:
        """Take the gradient of a Parameter, and add all if it is the last one. A hook of the Parameter."""
        gradient = parameter.grad
        if gradient is None:  # Delayed weight gradients come later.
            return
        # As Megatron's DDP does it. Transformer Engine adds to main_grad itself and sets the mark.
        is_added = parameter.grad_added_to_main_grad
        parameter.grad, parameter.grad_added_to_main_grad = None, False
        if is_added:
            return
        if parameter in self._pairs:  # from another step of the smart schedule
            self.add()
        self._pairs[parameter] = gradient
        self._num_bytes += gradient.nbytes
        if len(self._pairs) == self.num_wanted or self._num_bytes >= ADDED_BYTES:
            self.add()

    def add(self) -> None:
        if self._pairs:
            # Torch copies to another data type in one kernel, and adds in one for each tensor.
            add = torch._foreach_copy_ if self._are_first else torch._foreach_add_
            add([parameter.main_grad for parameter in self._pairs], [*self._pairs.values()])
            self._pairs.clear()
            self._num_bytes = 0
        self._are_first = False
