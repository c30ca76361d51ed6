"""Finds what this rank holds of the experts' Parameters: weights, master weights, optimizer states.

This module must find everything that Megatron's optimizer keeps for a Parameter. It knows three optimizers,
alone or in a ``ChainedOptimizer``:

* ``FP32Optimizer`` keeps the states of torch's optimizer for the Parameter itself.
* ``Float16OptimizerWithFloat16Params`` keeps an fp32 master copy, and the states for this copy.
* ``DistributedOptimizer`` keeps the same for the range of the Parameter in this rank's part of DDP's buffer.
  In fp32 the master is a view of the Parameter.

``LayerWiseDistributedOptimizer`` contains the first two. Each Parameter is whole in the optimizer of one rank
of the data-parallel group. States that are single numbers (Adam's ``step``) do not move. They must be equal
for all experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor
from torch.nn import Parameter

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters


@dataclass(frozen=True)
class ParameterState:
    """One Parameter and what the optimizer on this rank keeps for its elements ``[start, stop)``.

    ``tensors`` are master weights and optimizer states of these elements by name. This rank may update none.
    """

    parameter: Tensor  # all elements, as a flat view
    facts: Mapping[str, Any]  # what must be equal for all experts, by name
    is_trained: bool = True  # by an optimizer, maybe that of another rank
    start: int = 0
    stop: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # flat


class _Entry(NamedTuple):
    """Where an optimizer of Megatron's keeps the states of a Parameter's elements ``[start, stop)``."""

    optimizer: Any
    key: Tensor  # by which torch's optimizer finds the states: the Parameter or its master
    group: Mapping[str, Any]  # its parameter group, with the settings
    start: int
    stop: int


def parameter_states(slots: Sequence[ExpertParameters], optimizer: Any) -> list[list[ParameterState]]:
    """Return what this rank holds of every Parameter of every slot; refuse states that cannot be moved."""
    members = list(members_of(optimizer))
    entries = {parameter: entry for member in members for parameter, entry in _entries(member)}
    if is_layer_wise(optimizer):
        elsewhere = (parameter for slot in slots for parameter in slot if parameter not in entries)
        entries.update(dict.fromkeys(elsewhere))
    names = [type(member).__name__ for member in members]
    return [[_state_of(parameter, entries, names) for parameter in slot] for slot in slots]


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


def sharing_group(
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
    if kind is FP32Optimizer:
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, _Entry(optimizer, parameter, group, 0, parameter.numel())
    elif kind is Float16OptimizerWithFloat16Params:
        for group, halves, masters, singles in zip(
            optimizer.optimizer.param_groups,
            optimizer.float16_groups,
            optimizer.fp32_from_float16_groups,
            optimizer.fp32_from_fp32_groups,
            strict=True,
        ):
            for parameter, key in (*zip(halves, masters, strict=True), *zip(singles, singles, strict=True)):
                yield parameter, _Entry(optimizer, key, group, 0, parameter.numel())
    elif kind is DistributedOptimizer:
        for parameter in (parameter for buffer in optimizer.buffers for parameter in buffer.param_to_bucket):
            place = optimizer.model_param_group_index_map.get(parameter)
            if place is None:
                yield parameter, None
                continue
            group = optimizer.optimizer.param_groups[place[0]]
            part = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, _Entry(optimizer, group["params"][place[1]], group, part.start, part.end)


def _state_of(
    parameter: Parameter, entries: Mapping[Parameter, _Entry | None], optimizers: list[str]
) -> ParameterState:
    is_float = parameter.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not is_float or not parameter.is_contiguous():
        raise ConfigurationError(
            f"re-sharding: got an expert's parameter of data type {parameter.dtype} that is "
            f"{'' if parameter.is_contiguous() else 'not '}contiguous, wanted a contiguous one of "
            f"float32, bfloat16 or float16; {KEEP_OWNERS}"
        )
    flat = parameter.data.view(-1)
    is_trained = parameter.requires_grad
    facts = {"shape": tuple(parameter.shape), "data type": parameter.dtype, "frozen": not is_trained}
    if not is_trained:
        return ParameterState(flat, facts, is_trained)
    if parameter not in entries:
        raise ConfigurationError(
            f"re-sharding: got an expert's parameter that is in none of the optimizers {optimizers}, "
            "wanted it in an FP32Optimizer, a Float16OptimizerWithFloat16Params or a DistributedOptimizer; "
            f"use Megatron's --optimizer adam or sgd, or {KEEP_OWNERS}"
        )
    entry = entries[parameter]
    if entry is None:
        return ParameterState(flat, facts)
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
        got, wanted = (tensor.shape, tensor.dtype, tensor.device), (master.shape, torch.float32, part.device)
        if got != wanted or not tensor.is_contiguous():
            raise ConfigurationError(
                f"re-sharding: got an optimizer with {name} of {got}, wanted {wanted}; use Megatron's "
                f"--optimizer adam or sgd with states in fp32, or {KEEP_OWNERS}"
            )
    tensors = {name: tensor.view(-1) for name, tensor in tensors.items()}
    return ParameterState(flat, facts, is_trained, entry.start, entry.stop, tensors)


def _as_text(value: Any) -> str:
    return repr(value.tolist() if torch.is_tensor(value) else value)
