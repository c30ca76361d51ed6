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
from megatron_fssdp.config.strategy.strategy_settings import KEEP_OWNERS
from megatron_fssdp.megatron_adapter.experts.slot_states import (
    A_TENSOR,
    ParameterState,
    parameter_states,
    sharing_group,
)
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters

PARAMETERS = "parameters"


@dataclass(frozen=True, eq=False)
class PartedQuantity:
    """One quantity of all slots of a device, for example Adam's first moment: a ``SlotQuantity``.

    Attributes:
        name: Name of the quantity in messages.
        num_elements: Number of elements of one slot, with its Parameters one after another.
        dtype: Data type of all elements.
        device: Torch device that holds the elements.
        parts_W: For each slot, the parts that this rank holds: the first element's position in the slot,
            and a flat view of the elements.
        part_group: Group of the ranks that hold the parts of a slot, with every element on exactly one of
            them. ``None`` if this rank holds all elements.
    """

    name: str
    num_elements: int
    dtype: torch.dtype
    device: torch.device
    parts_W: Sequence[Sequence[tuple[int, Tensor]]]
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


Fact = tuple[str, Any]
"""What a rank found in its slots, after the kind of fact.

``problem``: why slots cannot be exchanged. ``layout``: number of slots, and of each Parameter shape, data
type and whether it is trained. ``profile``: position of a Parameter in its slot, its settings and states.
"""

Ranges = tuple[tuple[int, int, int], ...]
"""For every trained Parameter: begin and end of the rank's part, and elements of the whole Parameter."""


def slot_quantities(
    slots: Sequence[ExpertParameters],
    optimizer: Any,
    expert_parallel: dist.ProcessGroup,
    expert_data_parallel: dist.ProcessGroup,
) -> list[PartedQuantity]:
    """Return everything that travels with an expert: parameters, master weights and optimizer states.

    All ranks of both groups must call it. Before the first optimizer step there are no optimizer states.

    Raises:
        ConfigurationError: The slots are not interchangeable, or an optimizer keeps a state that cannot be
            moved. It is raised on all ranks that hold experts of the pipeline stage.
    """
    states_WO: list[list[ParameterState]] = []
    facts: set[Fact] = set()
    try:
        states_WO = parameter_states(slots, optimizer)
    except ConfigurationError as error:
        facts = {("problem", str(error))}
    for slot, states in zip(slots, states_WO, strict=False):  # there are none after an error
        pairs = [*zip(slot, states, strict=True)]
        layout = tuple((tuple(p.shape), p.dtype, state.trained) for p, state in pairs)
        facts.add(("layout", (len(slots), layout)))
        facts |= {("profile", (at, one.profile)) for at, one in enumerate(states) if one.profile is not None}
    trained = (state for states in states_WO for state in states if state.trained)
    ranges: Ranges = tuple((state.start, state.stop, state.parameter.numel()) for state in trained)
    copies: list[tuple[set[Fact], Ranges]] = _gathered((facts, ranges), expert_data_parallel)
    facts = set[Fact]().union(*(found for found, _ in copies))
    sharing, in_parts = sharing_group(slots, optimizer, expert_data_parallel), False
    if not _of(facts, "problem") and len(_of(facts, "layout")) == 1:
        members = set(dist.get_process_group_ranks(sharing))
        everyone = dist.get_process_group_ranks(expert_data_parallel)
        in_parts, problems = _are_parts(
            [of for rank, (_, of) in zip(everyone, copies, strict=True) if rank in members]
        )
        facts |= {("problem", problem) for problem in problems}
    facts = set[Fact]().union(*_gathered(facts, expert_parallel))
    if (problem := _problem_of(facts)) is not None:
        raise ConfigurationError(problem)
    return _quantities(states_WO, facts, sharing if in_parts else None) if states_WO else []


def _of(facts: set[Fact], kind: str) -> list[Any]:
    return [what for one, what in facts if one == kind]


def _gathered(own: Any, group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def _are_parts(copies: Sequence[Ranges]) -> tuple[bool, list[str]]:
    """Whether each rank of an optimizer holds only a part of every state, and the problem with the parts."""
    if all(last - first == size for ranges in copies for first, last, size in ranges):
        return False, []
    for ranges in zip(*copies, strict=True):
        size = ranges[0][2]
        parts = sorted((first, last) for first, last, _ in ranges if first < last)
        if [0, *(last for _, last in parts)] != [*(first for first, _ in parts), size]:
            return True, [
                f"re-sharding: got optimizer states for the element ranges {parts} of an expert's parameter "
                f"of {size} elements, wanted every element on one rank of the optimizer's data-parallel "
                f"group; use Megatron's DDP and distributed optimizer, or {KEEP_OWNERS}"
            ]
    return True, []


def _problem_of(facts: set[Fact]) -> str | None:
    """Why slots in which this was found cannot be exchanged; equal on all ranks."""
    if problems := _of(facts, "problem"):
        return str(min(problems))
    layouts = sorted(_of(facts, "layout"), key=repr)
    if len({(size, tuple(one[:2] for one in layout)) for size, layout in layouts}) < len(layouts):
        return (
            "re-sharding: got experts of which some are frozen and others are trained, wanted one of the two "
            "for all experts of a pipeline stage, because a re-shard moves experts to each other's places; "
            f"freeze or train all of them, or {KEEP_OWNERS}"
        )
    if len(layouts) > 1:
        return (
            f"re-sharding: got expert slots with parameters {layouts[0]} and {layouts[1]}, wanted the same "
            f"number of slots on all devices and the same shapes and data types in all slots; {KEEP_OWNERS}"
        )
    profiles = [(position, dict(profile)) for position, profile in _of(facts, "profile")]
    for position in sorted({position for position, _ in profiles}):
        of_slots = [profile for at, profile in profiles if at == position]
        values = {
            name: sorted({profile.get(name, "none") for profile in of_slots})
            for name in sorted(set[str]().union(*of_slots))
        }
        if listing := "; ".join(f"{name}: {' and '.join(x)}" for name, x in values.items() if len(x) > 1):
            return (
                f"re-sharding: parameter {position} of the experts does not train the same way in all slots: "
                f"got {listing}, wanted equal values for all experts of a pipeline stage; remove the "
                f"settings for single layers, or {KEEP_OWNERS}"
            )
    return None


def _quantities(
    states_WO: Sequence[Sequence[ParameterState]], facts: set[Fact], part_group: dist.ProcessGroup | None
) -> list[PartedQuantity]:
    # Every quantity has all elements of a slot. Those of a Parameter that has no such state are in no part.
    *offsets, num_elements = accumulate((state.parameter.numel() for state in states_WO[0]), initial=0)
    profiles = [profile for _, profile in _of(facts, "profile")]
    states = {name for profile in profiles for name, value in profile if value == A_TENSOR}
    kinds = [(PARAMETERS, dtype) for dtype in dict.fromkeys(one.parameter.dtype for one in states_WO[0])]
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
