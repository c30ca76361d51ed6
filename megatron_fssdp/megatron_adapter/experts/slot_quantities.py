"""Turns Parameters, master weights and optimizer states of experts into quantities that slots can exchange.

All ranks that hold a pipeline stage's experts first compare whether an expert trains in the same way in every
slot; all of them continue or raise. With the distributed optimizer, each rank of an expert-data-parallel
group holds the states of a part of each slot only. The parts are put together, and each rank keeps its part
of them::

    elements of a slot   0 ......................... num_elements
    rank 0 holds         |aaaaaaaaaaaaa|
    rank 1 holds                       |bbbbbbbbbbbbbbbb|
    read, on all ranks   |aaaaaaaaaaaaabbbbbbbbbbbbbbbbb|

Shape letters: O Parameters of an expert, Q elements of a piece, W slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.megatron_adapter.all_ranks import of_all_ranks
from megatron_fssdp.megatron_adapter.experts.slot_states import (
    ParameterState,
    parameter_states,
    sharing_group,
)
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters

PARAMETERS = "parameters"


@dataclass(frozen=True, eq=False)
class PartedQuantity:
    """One quantity of all slots of a device, for example Adam's first moment: a ``SlotQuantity``."""

    name: str  # in messages
    num_elements: int  # of one slot, with its Parameters one after another
    dtype: torch.dtype
    device: torch.device
    # The parts of each slot that this rank holds: position of the first element in the slot, flat elements.
    parts_W: Sequence[Sequence[tuple[int, Tensor]]]
    # Ranks that hold the parts, with every element on exactly one of them; None if this rank holds all.
    part_group: dist.ProcessGroup | None

    def read(self, slots: Sequence[int], start: int, out_WQ: Tensor) -> None:
        """Fill ``out_WQ`` with Q elements of each slot; collective over ``part_group`` if it is set."""
        if self.part_group is not None:
            out_WQ.zero_()
        for piece, target in self._overlaps(slots, start, out_WQ):
            target.copy_(piece)
        if self.part_group is not None and len(slots):
            # Elements of other ranks are zero here, so the sum collects all parts. The sum is taken over
            # integers because -0.0 + 0.0 is 0.0, which would lose the sign.
            dist.all_reduce(out_WQ.view(torch.int32), group=self.part_group)

    def write(self, slots: Sequence[int], start: int, rows_WQ: Tensor) -> None:
        """Write the elements that belong to this rank's parts, and ignore the others."""
        for piece, source in self._overlaps(slots, start, rows_WQ):
            piece.copy_(source)

    def _overlaps(self, slots: Sequence[int], start: int, rows_WQ: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the ranges of this rank's parts that lie in a piece, with the same ranges of its rows."""
        for slot, row_Q in zip(slots, rows_WQ, strict=True):
            for offset, part in self.parts_W[slot]:
                first = max(offset, start)
                last = min(offset + part.numel(), start + row_Q.numel())
                if first < last:
                    yield part[first - offset : last - offset], row_Q[first - start : last - start]


# What a rank found in its slots, by name; different values of one name are an error, and so is a "problem".
Facts = set[tuple[str, Any]]
# Of every trained Parameter: begin and end of the rank's part, and elements of the whole Parameter.
Ranges = tuple[tuple[int, int, int], ...]


def slot_quantities(
    slots: Sequence[ExpertParameters],
    optimizer: Any,
    expert_parallel: dist.ProcessGroup,
    expert_data_parallel: dist.ProcessGroup,
) -> list[PartedQuantity]:
    """Return everything that travels with an expert: parameters, master weights and optimizer states, if any.

    All ranks of both groups must call it.

    Raises:
        ConfigurationError: The slots are not interchangeable, or an optimizer keeps a state that cannot be
            moved. It is raised on all ranks that hold experts of the pipeline stage.
    """
    states_WO: list[list[ParameterState]] = []
    facts: Facts = set()
    try:
        states_WO = parameter_states(slots, optimizer)
        facts = {("number of slots of a device", len(slots))}
    except ConfigurationError as error:
        facts = {("problem", str(error))}
    states = [(at, state) for states_O in states_WO for at, state in enumerate(states_O)]
    facts |= {
        (f"{name} of parameter {at}", value) for at, state in states for name, value in state.facts.items()
    }
    ranges: Ranges = tuple((s.start, s.stop, s.parameter.numel()) for _, s in states if s.is_trained)
    copies: list[tuple[Facts, Ranges]] = of_all_ranks((facts, ranges), expert_data_parallel)
    facts = Facts().union(*(found for found, _ in copies))
    sharing = sharing_group(slots, optimizer, expert_data_parallel)
    are_parts = False
    if _conflict(facts) is None:  # so that all copies have ranges of the same Parameters
        members = set(dist.get_process_group_ranks(sharing))
        everyone = dist.get_process_group_ranks(expert_data_parallel)
        of_members = [of for rank, (_, of) in zip(everyone, copies, strict=True) if rank in members]
        are_parts = any(last - first < size for of in of_members for first, last, size in of)
        if are_parts:
            facts |= {("problem", problem) for problem in _problems_of_parts(of_members)}
    facts = Facts().union(*of_all_ranks(facts, expert_parallel))
    if (problem := _conflict(facts)) is not None:
        raise ConfigurationError(problem)
    return _quantities(states_WO, facts, sharing if are_parts else None) if states_WO else []


def _problems_of_parts(copies: Sequence[Ranges]) -> Iterator[str]:
    """Yield why the ranks of an optimizer do not hold every element of every state exactly once."""
    for ranges in zip(*copies, strict=True):
        size = ranges[0][2]
        parts = sorted((first, last) for first, last, _ in ranges if first < last)
        if [0, *(last for _, last in parts)] != [*(first for first, _ in parts), size]:
            yield (
                f"re-sharding: got optimizer states for the element ranges {parts} of an expert's parameter "
                f"of {size} elements, wanted every element on one rank of the optimizer's data-parallel "
                f"group; use Megatron's DDP and distributed optimizer, or {KEEP_OWNERS}"
            )


def _conflict(facts: Facts) -> str | None:
    values: dict[str, list[str]] = {}
    for name, value in sorted(facts, key=repr):
        values.setdefault(name, []).append(str(value))
    if problems := values.get("problem"):
        return problems[0]
    for name, found in values.items():
        if len(found) > 1:
            return (
                f"re-sharding: got expert slots that differ in {name}: {' and '.join(found)}, wanted equal "
                "values for all experts of a pipeline stage, because a re-shard moves experts to each "
                f"other's places; remove the settings for single experts or layers, or {KEEP_OWNERS}"
            )
    return None


def _quantities(
    states_WO: Sequence[Sequence[ParameterState]], facts: Facts, part_group: dist.ProcessGroup | None
) -> list[PartedQuantity]:
    # Every quantity has all elements of a slot. Those of a Parameter that has no such state are in no part.
    *offsets, num_elements = accumulate((state.parameter.numel() for state in states_WO[0]), initial=0)
    # Another rank may hold the part of a Parameter that has a state.
    states = {state for name, found in facts if name.startswith("names of tensors") for state in found}
    kinds = [(PARAMETERS, dtype) for dtype in dict.fromkeys(state.parameter.dtype for state in states_WO[0])]
    kinds += [(name, torch.float32) for name in sorted(states)]
    device = states_WO[0][0].parameter.device
    return [
        PartedQuantity(
            name,
            num_elements,
            dtype,
            device,
            [[*_parts(states, offsets, name, dtype)] for states in states_WO],
            None if name == PARAMETERS else part_group,
        )
        for name, dtype in kinds
    ]


def _parts(
    states_O: Sequence[ParameterState], offsets_O: Sequence[int], name: str, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    for state, offset in zip(states_O, offsets_O, strict=True):
        if name != PARAMETERS and name in state.tensors:
            yield offset + state.start, state.tensors[name]
        elif name == PARAMETERS and state.parameter.dtype == dtype:
            yield offset, state.parameter
