"""Turns all that a rank holds of the experts' Parameters into quantities that slots can exchange.

They are weights, master weights and optimizer states. This file must find everything that Megatron's
optimizer keeps for a Parameter. It knows three optimizers, alone or in a ``ChainedOptimizer``:

* ``FP32Optimizer`` keeps the states of torch's optimizer for the Parameter itself.
* ``Float16OptimizerWithFloat16Params`` keeps an fp32 master copy, and the states for this copy.
* ``DistributedOptimizer`` keeps the same for the range of the Parameter in this rank's part of DDP's buffer.
  In fp32 the master is a view of the Parameter.

``LayerWiseDistributedOptimizer`` contains the first two. Each Parameter is whole in the optimizer of one rank
of the data-parallel group. States that are single numbers (Adam's ``step``) do not move. They must be equal
for all experts.

All ranks that hold a pipeline stage's experts first compare whether an expert trains in the same way in every
slot; all of them continue or raise. With the distributed optimizer, each rank of an expert-data-parallel
group holds the states of a part of each slot only.

Shape letters: O Parameters of an expert, W slots.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor
from torch.nn import Parameter

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.collectives.sparse.slot_exchange import SlotQuantity
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters

PARAMETERS = "parameters"


# What a rank found in its slots, by name; different values of one name are an error, and so is a "problem".
Facts = set[tuple[str, Any]]


class _Entry(NamedTuple):
    """Where an optimizer of Megatron's keeps the states of a Parameter's elements ``[start, stop)``."""

    optimizer: Any
    key: Tensor  # by which torch's optimizer finds the states: the Parameter or its master
    group: Mapping[str, Any]  # its parameter group, with the settings
    start: int
    stop: int


@dataclass(frozen=True)
class _Held:
    """What this rank holds of a Parameter: all its elements, and of what is kept for them ``[start, stop)``.

    ``facts`` must be equal for all experts. This rank may keep nothing, where other ranks update a Parameter.
    """

    parameter: Tensor  # flat
    facts: Mapping[str, Any]
    is_trained: bool = True  # by an optimizer, maybe that of another rank
    start: int = 0
    stop: int = 0
    kept: Mapping[str, Tensor] = field(default_factory=dict)  # master weights and optimizer states, flat

    def part(self, name: str) -> tuple[int, Tensor] | None:
        """Where its elements of a quantity begin, and these."""
        if name == PARAMETERS:
            return 0, self.parameter
        return (self.start, self.kept[name]) if name in self.kept else None


def slot_quantities(
    slots: Sequence[ExpertParameters],
    optimizer: Any,
    expert_parallel: dist.ProcessGroup,
    expert_data_parallel: dist.ProcessGroup,
) -> list[SlotQuantity]:
    """Return everything that travels with an expert: parameters, master weights and optimizer states, if any.

    All ranks of both groups must call it.

    Raises:
        ConfigurationError: The slots are not interchangeable, or an optimizer keeps a state that cannot be
            moved. It is raised on all ranks that hold experts of the pipeline stage.
    """
    held_WO: list[list[_Held]] = []
    try:
        held_WO = _held_of(slots, optimizer)
        facts: Facts = {("number of slots of a device", len(slots))}
    except ConfigurationError as error:
        facts = {("problem", str(error))}
    of_slots = [(at, held) for held_O in held_WO for at, held in enumerate(held_O)]
    facts |= {
        (f"{name} of parameter {at}", value) for at, held in of_slots for name, value in held.facts.items()
    }
    # Of every trained Parameter: begin and end of the rank's part, and elements of the whole Parameter.
    ranges = [(held.start, held.stop, held.parameter.numel()) for _, held in of_slots if held.is_trained]
    copies = of_all_ranks((facts, ranges), expert_data_parallel)
    facts = Facts().union(*(copy_facts for copy_facts, _ in copies))
    sharing = _sharing_group(slots, optimizer, expert_data_parallel)
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
    if not held_WO:
        return []
    # Every quantity has all elements of a slot. Those of a Parameter that has no such state are in no part.
    *offsets_O, num_elements = accumulate((held.parameter.numel() for held in held_WO[0]), initial=0)
    # Another rank may hold the part of a Parameter that has a state.
    names = {name for fact, value in facts if fact.startswith("names of tensors") for name in value}
    first = held_WO[0][0].parameter  # All of an expert have one data type.
    return [
        SlotQuantity(
            name,
            num_elements,
            first.dtype if name == PARAMETERS else torch.float32,
            first.device,
            [
                [
                    (offset + part[0], part[1])
                    for held, offset in zip(held_O, offsets_O, strict=True)
                    if (part := held.part(name)) is not None
                ]
                for held_O in held_WO
            ],
            sharing if are_parts and name != PARAMETERS else None,
        )
        for name in (PARAMETERS, *sorted(names))
    ]


def _problems_of_parts(copies: Sequence[Sequence[tuple[int, int, int]]]) -> Iterator[str]:
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
    for name, texts in values.items():
        if len(texts) > 1:
            return (
                f"re-sharding: got expert slots that differ in {name}: {' and '.join(texts)}, wanted equal "
                "values for all experts of a pipeline stage, because a re-shard moves experts to each "
                f"other's places; remove the settings for single experts or layers, or {KEEP_OWNERS}"
            )
    return None


def members_of(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, or those that are chained in it, without stubs, which have no parameters here."""
    if hasattr(optimizer, "chained_optimizers"):
        for member in optimizer.chained_optimizers:
            yield from members_of(member)
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def is_layer_wise(optimizer: Any) -> bool:
    """Whether a layer-wise optimizer is part of an optimizer, so that other ranks have some Parameters."""
    return type(optimizer).__name__ == "LayerWiseDistributedOptimizer" or any(
        is_layer_wise(member) for member in getattr(optimizer, "chained_optimizers", ())
    )


def _held_of(slots: Sequence[ExpertParameters], optimizer: Any) -> list[list[_Held]]:
    """Return what this rank holds of every Parameter of every slot; refuse states that cannot be moved."""
    members = list(members_of(optimizer))
    entries = {parameter: entry for member in members for parameter, entry in _entries(member)}
    if is_layer_wise(optimizer):
        elsewhere = (p for slot in slots for p in slot if hasattr(p, "main_grad") and p not in entries)
        entries.update(dict.fromkeys(elsewhere))
    names = [type(member).__name__ for member in members]
    return [[_held(parameter, entries, names) for parameter in slot] for slot in slots]


def _sharing_group(
    slots: Sequence[ExpertParameters], optimizer: Any, expert_data_parallel: dist.ProcessGroup
) -> dist.ProcessGroup:
    """Return the group whose ranks together hold the optimizer states of this rank's experts once."""
    # Of several instances of the distributed optimizer, each has all states on a part of the ranks.
    for member in members_of(optimizer):
        buffers = member.buffers if type(member) is DistributedOptimizer and slots else ()
        if any(slots[0][0] in buffer.param_to_bucket for buffer in buffers):
            return member.data_parallel_group
    return expert_data_parallel


def _entries(optimizer: Any) -> Iterator[tuple[Parameter, _Entry | None]]:
    """Yield every Parameter of one optimizer, with ``None`` if this rank updates no part of it."""
    # The exact type is compared because a subclass may keep more states than its base class.
    kind = type(optimizer)
    if kind is DistributedOptimizer:
        for parameter in (parameter for buffer in optimizer.buffers for parameter in buffer.param_to_bucket):
            place = optimizer.model_param_group_index_map.get(parameter)
            if place is None:
                yield parameter, None
                continue
            group = optimizer.optimizer.param_groups[place[0]]
            part = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, _Entry(optimizer, group["params"][place[1]], group, part.start, part.end)
    elif kind in (FP32Optimizer, Float16OptimizerWithFloat16Params):
        halves = chain.from_iterable(getattr(optimizer, "float16_groups", ()))
        parameter_of = {parameter.main_param: parameter for parameter in halves}
        for group in optimizer.optimizer.param_groups:
            for key in group["params"]:
                yield parameter_of.get(key, key), _Entry(optimizer, key, group, 0, key.numel())


def _held(parameter: Parameter, entries: Mapping[Parameter, _Entry | None], optimizers: list[str]) -> _Held:
    is_float = parameter.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not is_float or not parameter.is_contiguous():
        raise ConfigurationError(
            f"re-sharding: got an expert's parameter of data type {parameter.dtype} that is "
            f"{'' if parameter.is_contiguous() else 'not '}contiguous, wanted a contiguous one of "
            f"float32, bfloat16 or float16; {KEEP_OWNERS}"
        )
    if not parameter.untyped_storage().nbytes():
        raise ConfigurationError(
            "experts: got a parameter without memory, because the host has offloaded it, wanted it on its "
            "device; load the model before experts move or go home"
        )
    flat = parameter.data.view(-1)
    is_frozen = not parameter.requires_grad
    facts = {"shape": tuple(parameter.shape), "data type": parameter.dtype, "frozen": is_frozen}
    # An optimizer also steps what was frozen after it was built.
    if is_frozen and parameter not in entries:
        return _Held(flat, facts, is_trained=False)
    if parameter not in entries:
        raise ConfigurationError(
            f"re-sharding: got an expert's parameter that is in none of the optimizers {optimizers}, "
            "wanted it in an FP32Optimizer, a Float16OptimizerWithFloat16Params or a DistributedOptimizer; "
            f"use Megatron's --optimizer adam or sgd, or {KEEP_OWNERS}"
        )
    entry = entries[parameter]
    if entry is None:
        return _Held(flat, facts)
    if getattr(entry.optimizer.config, "optimizer_cpu_offload", False):
        raise ConfigurationError(
            "re-sharding: got --optimizer-cpu-offload, wanted optimizer states on the device of their "
            f"parameters; remove the flag, or {KEEP_OWNERS}"
        )
    settings = {key: value for key, value in entry.group.items() if key not in ("params", "param_names")}
    facts |= {f"setting {key}": _as_text(value) for key, value in settings.items()}
    tensors: dict[str, Tensor] = {}
    # The mapping is a defaultdict: an index would create an empty state for a missing key.
    for key, value in entry.optimizer.optimizer.state.get(entry.key, {}).items():
        if torch.is_tensor(value) and value.dim() > 0:
            tensors[f"state {key}"] = value.data
        else:
            facts[f"state {key}"] = _as_text(value)
    part, master = flat[entry.start : entry.stop], entry.key.data
    if master.data_ptr() != part.data_ptr():
        tensors["master parameters"] = master
    facts["names of tensors"] = tuple(sorted(tensors))
    for name, tensor in tensors.items():
        # Their device does not matter: verl keeps them on the host while it generates.
        got, wanted = (tensor.shape, tensor.dtype), (master.shape, torch.float32)
        if got != wanted or not tensor.is_contiguous():
            raise ConfigurationError(
                f"re-sharding: got an optimizer with {name} of {got}, wanted {wanted}; use Megatron's "
                f"--optimizer adam or sgd with states in fp32, or {KEEP_OWNERS}"
            )
    tensors = {name: tensor.view(-1) for name, tensor in tensors.items()}
    return _Held(flat, facts, True, entry.start, entry.stop, tensors)


def _as_text(value: Any) -> str:
    return repr(value.tolist() if torch.is_tensor(value) else value)
