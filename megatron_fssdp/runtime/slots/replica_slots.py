"""The replica slots of one layer on this device: Parameters with fixed names, whose memory comes and goes.

A slot is a place for one expert's weights. Owned slots hold the Parameters that Megatron registered; they
stay in autograd and in Megatron's DDP. Replica slots have Parameters of their own::

    slot        0        1        2            3
                owned    owned    replica 0    replica 1
    weights     Megatron's        [numel] each, in the experts' data type; memory while an expert is here
    gradients   main_grad         [numel] each, fp32 sums;                 memory from a backward pass until
                                                                           the sums have reached the owners

The Parameters are made once, so the experts' module can be bound to them once. Only their storage is given
back and taken again. A tensor that autograd saved stays valid in this way, because it is the Parameter
itself. On CUDA, autograd adds to the sums on the stream of the experts' forward pass. Megatron's DDP keeps
autograd's nodes of owned experts, and with them their stream, from one graph to the next; nothing keeps
these.
"""

from collections.abc import Iterable
from typing import Any

import torch

from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertParameters


class ReplicaSlots:
    """Replica slots with the weights and the gradient sums of the experts that they hold.

    Replicas always have gradients: only its owner knows whether an expert is frozen, and it then drops them.
    """

    def __init__(self, layout: ExpertLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._weights: list[_Memory] = []
        self._sums: list[_Memory] = []
        self._parameters: list[ExpertParameters] = []
        self._slot_of: dict[int, int] = {}

    def hold(self, experts: Iterable[int]) -> None:
        """Set which experts the slots hold. An expert that stays keeps its slot and its contents."""
        wanted = sorted(experts)
        for expert in [expert for expert in self._slot_of if expert not in wanted]:
            self._weights[self._slot_of.pop(expert)].give_back()
        free = iter(slot for slot in range(len(wanted)) if slot not in self._slot_of.values())
        for expert in wanted:
            if expert not in self._slot_of:
                slot = self._slot_of[expert] = next(free)
                if slot == len(self._weights):
                    self._add_slot()

    @property
    def experts(self) -> tuple[int, ...]:
        """The experts that the slots hold, ascending."""
        return tuple(sorted(self._slot_of))

    def parameters(self, expert: int) -> ExpertParameters:
        """The Parameters of an expert's slot."""
        return self._parameters[self._slot_of[expert]]

    @property
    def held_bytes(self) -> int:
        """Memory that weights and gradient sums occupy now, in bytes."""
        return sum(one.storage.nbytes() for one in (*self._weights, *self._sums))

    def open_weights(self) -> None:
        """Take the memory of the weights of all held experts; those that have it keep their contents."""
        for slot in self._slot_of.values():
            self._weights[slot].take()

    def weights(self) -> dict[int, torch.Tensor]:
        """Flat weights ``[numel]`` by expert, for writing; their memory must be open."""
        return {expert: self._weights[slot].flat for expert, slot in self._slot_of.items()}

    def close_weights(self) -> None:
        """Give back the memory of all weights."""
        for one in self._weights:
            one.give_back()

    def open_sums(self) -> None:
        """Take the memory of the gradient sums, with zeros; sums that are open keep their contents."""
        for slot in self._slot_of.values():
            if self._sums[slot].take():
                self._sums[slot].flat.zero_()

    def sums(self) -> dict[int, torch.Tensor]:
        """Flat gradient sums ``[numel]`` by expert, in fp32 or wider; their memory must be open."""
        return {expert: self._sums[slot].flat for expert, slot in self._slot_of.items()}

    def close_sums(self) -> None:
        """Give back the memory of all gradient sums."""
        for one in self._sums:
            one.give_back()

    def _add_slot(self) -> None:
        layout = self.layout
        flat = torch.empty(layout.numel, dtype=layout.dtype, device=self.device)
        total = torch.empty(layout.numel, dtype=accumulation_dtype(layout.dtype), device=self.device)
        made = []
        for weight, gradient in zip(layout.unpack(flat), layout.unpack(total), strict=True):
            parameter: Any = torch.nn.Parameter(weight)
            # The names under which Megatron's layers and Transformer Engine look for a gradient's place.
            parameter.main_grad, parameter.allreduce = gradient, False
            parameter.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(_add_to_sum)
            made.append(parameter)
        # .data has a version counter of its own, so autograd does not see a refilled weight as a change.
        self._weights.append(_Memory(flat.data))
        self._sums.append(_Memory(total))
        self._parameters.append(tuple(made))


class _Memory:
    """A flat tensor whose memory comes and goes; at first it has none."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat, self.storage, self._num_bytes = flat, flat.untyped_storage(), flat.nbytes
        self.give_back()

    def take(self) -> bool:
        """Take the memory, and return whether there was none."""
        # A resize to the same size would move the contents, which a transfer may be writing.
        is_new = not self.storage.nbytes()
        if is_new:
            self.storage.resize_(self._num_bytes)
        return is_new

    def give_back(self) -> None:
        self.storage.resize_(0)


def _add_to_sum(parameter: Any) -> None:
    gradient = parameter.grad
    if gradient is None:  # Delayed weight gradients come later.
        return
    # As Megatron's DDP does it. Transformer Engine adds to main_grad itself and sets the mark.
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(gradient)
    parameter.grad, parameter.grad_added_to_main_grad = None, False
