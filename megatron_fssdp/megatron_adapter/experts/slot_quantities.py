"""Turns Parameters, master weights and optimizer states of experts into quantities that slots can exchange.

Slots are interchangeable if an expert trains in the same way in each of them. All ranks that hold a
pipeline stage's experts compare this before anything moves. Either all of them continue or all of them
raise.

With the distributed optimizer, each rank of an expert-data-parallel group holds the optimizer states of
a part of each slot only. The parts are put together before an exchange, and each rank keeps its part
afterwards::

    elements of a slot   0 ......................... num_elements
    rank 0 holds         |aaaaaaaaaaaaa|
    rank 1 holds                       |bbbbbbbbbbbbbbbb|
    read, on all ranks   |aaaaaaaaaaaaabbbbbbbbbbbbbbbbb|

Shape letters: O Parameters of an expert, Q elements of a piece, W slots.
"""

from collections.abc import Sequence
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
    PARAMETERS,
    ParameterState,
    Profile,
    parameter_states,
    sharing_group,
)
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters

Layout = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class PartedQuantity:
    """One quantity of all slots of a device, for example Adam's first moment.

    A rank may hold only parts of it. The class implements
    :class:`megatron_fssdp.collectives.sparse.slot_exchange.SlotQuantity`.

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
        """Collect a range of elements of some slots; collective over ``part_group`` if it is set.

        Args:
            slots: Slots to read, N numbers.
            start: First element of the range.
            out_WQ: Output ``[N, C]``: C elements of each slot.
        """
        if self.part_group is not None:
            out_WQ.zero_()
        for slot, row_Q in zip(slots, out_WQ, strict=True):
            for piece, target in self._overlaps(slot, start, row_Q):
                target.copy_(piece)
        if self.part_group is not None and len(slots):
            # Elements of other ranks are zero here, so the sum collects all parts. The sum is taken over
            # integers because -0.0 + 0.0 is 0.0, which would lose the sign.
            dist.all_reduce(out_WQ.view(torch.int32), group=self.part_group)

    def write(self, slots: Sequence[int], start: int, rows_WQ: Tensor) -> None:
        """Write the elements that belong to this rank's parts, and ignore the others.

        Args:
            slots: Slots to write, N numbers.
            start: First element of the range.
            rows_WQ: New elements ``[N, C]`` of each slot.
        """
        for slot, row_Q in zip(slots, rows_WQ, strict=True):
            for piece, source in self._overlaps(slot, start, row_Q):
                piece.copy_(source)

    def _overlaps(self, slot: int, start: int, row_Q: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the ranges of this rank's parts that lie in a piece, with the same ranges of its row."""
        overlaps = []
        for offset, part in self.parts_W[slot]:
            first = max(offset, start)
            last = min(offset + part.numel(), start + row_Q.numel())
            if first < last:
                overlaps.append((part[first - offset : last - offset], row_Q[first - start : last - start]))
        return overlaps


@dataclass(frozen=True)
class _Report:
    """What one rank, or several ranks together, tell the others about their slots.

    Attributes:
        problem: Why the slots cannot be exchanged; ``None`` if they can.
        layout: Number of slots, and shape, data type and whether it is trained of each Parameter of a slot.
        profiles_O: Optimizer settings found for each Parameter of a slot; one entry each if all slots train
            in the same way.
        ranges: For every trained Parameter: first element of the rank's part, end of the part, and number
            of elements of the whole Parameter.
    """

    problem: str | None
    layout: Layout = ()
    profiles_O: tuple[frozenset[Profile], ...] = ()
    ranges: tuple[tuple[int, int, int], ...] = ()


def slot_quantities(
    slots: Sequence[ExpertParameters],
    optimizer: Any,
    *,
    expert_parallel: dist.ProcessGroup,
    expert_data_parallel: dist.ProcessGroup,
) -> list[PartedQuantity]:
    """Return everything that travels with an expert: parameters, master weights and optimizer states.

    All ranks of both groups must call it. Before the first optimizer step there are no optimizer states.

    Args:
        slots: Parameters of each slot of this rank.
        optimizer: Megatron's optimizer.
        expert_parallel: Group of the ranks that share the experts.
        expert_data_parallel: Group of the ranks that hold the same experts as this rank.

    Raises:
        ConfigurationError: The slots are not interchangeable, or an optimizer keeps a state that cannot be
            moved. It is raised on all ranks that hold experts of the pipeline stage.
    """
    try:
        states_WO = parameter_states(slots, optimizer)
        own = _describe(slots, states_WO)
    except ConfigurationError as error:
        own = _Report(str(error))
    copies = _gathered(own, expert_data_parallel)
    sharing = sharing_group(slots, optimizer, expert_data_parallel)
    members = set(dist.get_process_group_ranks(sharing))
    everyone = dist.get_process_group_ranks(expert_data_parallel)
    in_parts, problem = _are_parts(
        [copy for rank, copy in zip(everyone, copies, strict=True) if rank in members]
    )
    agreed = _merge(_gathered(_merge(copies, problem), expert_parallel))
    if agreed.problem is not None:
        raise ConfigurationError(agreed.problem)
    return _quantities(states_WO, agreed, sharing if in_parts else None)


def _describe(slots: Sequence[ExpertParameters], states_WO: Sequence[Sequence[ParameterState]]) -> _Report:
    layouts = [
        tuple((tuple(p.shape), p.dtype, state.trained) for p, state in zip(slot, states, strict=True))
        for slot, states in zip(slots, states_WO, strict=True)
    ]
    different = next((layout for layout in layouts if layout != layouts[0]), None)
    if different is not None:
        return _Report(_not_alike(layouts[0], different))
    profiles_O = tuple(
        frozenset(state.profile for state in states if state.profile is not None)
        for states in zip(*states_WO, strict=True)
    )
    ranges = tuple(
        (state.start, state.start + state.num_elements, state.parameter.numel())
        for states in states_WO
        for state in states
        if state.trained
    )
    return _Report(None, (len(layouts), *layouts[:1]), profiles_O, ranges)


def _gathered(report: _Report, group: dist.ProcessGroup) -> list[_Report]:
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    return reports


def _are_parts(copies: Sequence[_Report]) -> tuple[bool, str | None]:
    """Find out how the ranks of one optimizer share the states of the same experts.

    Returns:
        Whether each rank holds only a part of every state, and the problem if the parts do not form
        the whole exactly once. The problem is ``None`` if there is no problem.
    """
    if any(copy.problem is not None or copy.layout != copies[0].layout for copy in copies):
        return False, None
    if all(last - first == size for copy in copies for first, last, size in copy.ranges):
        return False, None
    for ranges in zip(*(copy.ranges for copy in copies), strict=True):
        size = ranges[0][2]
        parts = sorted((first, last) for first, last, _ in ranges if first < last)
        ends, starts = [0, *(last for _, last in parts)], [*(first for first, _ in parts), size]
        if ends != starts:
            return True, (
                f"re-sharding: got optimizer states for the element ranges {parts} of an expert's parameter "
                f"of {size} elements, wanted every element on one rank of the optimizer's data-parallel "
                f"group; use Megatron's DDP and distributed optimizer, or {KEEP_OWNERS}"
            )
    return True, None


def _merge(reports: Sequence[_Report], problem: str | None = None) -> _Report:
    first = reports[0]
    problem = problem or next((report.problem for report in reports if report.problem is not None), None)
    if problem is not None:
        return _Report(problem)
    for report in reports:
        if report.layout != first.layout:
            return _Report(_not_alike(first.layout, report.layout))
    profiles_O = tuple(
        frozenset().union(*profiles)
        for profiles in zip(*(report.profiles_O for report in reports), strict=True)
    )
    for position, profiles in enumerate(profiles_O):
        if len(profiles) > 1:
            return _Report(_trained_differently(position, profiles))
    return _Report(None, first.layout, profiles_O)


def _quantities(
    states_WO: Sequence[Sequence[ParameterState]], agreed: _Report, part_group: dist.ProcessGroup | None
) -> list[PartedQuantity]:
    if not states_WO:
        return []
    dtypes_O = [state.parameter.dtype for state in states_WO[0]]
    tensors_O = [
        {name for profile in profiles for name, value in profile if value == A_TENSOR}
        for profiles in agreed.profiles_O
    ]
    # Each quantity has a name, a data type, and the positions in a slot of the Parameters that have it.
    kinds = [
        (PARAMETERS, dtype, [p for p, other in enumerate(dtypes_O) if other == dtype])
        for dtype in dict.fromkeys(dtypes_O)
    ] + [
        (name, torch.float32, [p for p, names in enumerate(tensors_O) if name in names])
        for name in sorted(set().union(*tensors_O))
    ]
    quantities = []
    for name, dtype, positions in kinds:
        sizes = [states_WO[0][p].parameter.numel() for p in positions]
        offsets = list(accumulate(sizes, initial=0))
        parts_W = [
            [_part(states[p], name, offset) for p, offset in zip(positions, offsets, strict=False)]
            for states in states_WO
        ]
        quantities.append(
            PartedQuantity(
                name,
                offsets[-1],
                dtype,
                states_WO[0][0].parameter.device,
                [[part for part in parts if part[1].numel()] for parts in parts_W],
                None if name == PARAMETERS else part_group,
            )
        )
    return quantities


def _part(state: ParameterState, name: str, offset: int) -> tuple[int, Tensor]:
    if name == PARAMETERS:
        return offset, state.parameter
    return offset + state.start, state.tensors.get(name, state.parameter[:0])


def _not_alike(one: Layout, other: Layout) -> str:
    return (
        f"re-sharding: got expert slots with parameters {one} and {other}, wanted the same number of slots "
        f"on all devices and the same shapes and data types in all slots; {KEEP_OWNERS}"
    )


def _trained_differently(position: int, profiles: frozenset[Profile]) -> str:
    options = [dict(profile) for profile in sorted(profiles)]
    names = sorted(set().union(*options))
    differing = [
        f"{name}: {' and '.join(sorted({str(option.get(name, 'none')) for option in options}))}"
        for name in names
        if len({option.get(name) for option in options}) > 1
    ]
    return (
        f"re-sharding: parameter {position} of the experts does not train the same way in all slots: got "
        f"{'; '.join(differing)}, wanted equal values for all experts of a pipeline stage; remove the "
        f"settings for single layers, or {KEEP_OWNERS}"
    )
