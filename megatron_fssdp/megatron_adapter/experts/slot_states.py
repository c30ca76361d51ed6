"""What this rank holds of the experts' Parameters: weights, master weights and optimizer states.

Slots exchange contents, never Parameters, so everything that Megatron's optimizers keep about a
Parameter has to be found. Three of them are known, alone or in a ``ChainedOptimizer``:

* ``FP32Optimizer``: states of the Parameter itself, whatever torch's optimizer keeps;
* ``Float16OptimizerWithFloat16Params``: an fp32 master copy, and states of that;
* ``DistributedOptimizer``: the same of a range of the Parameter, which ends where the rank's
  part of DDP's buffer ends; in fp32 the master is a view of the Parameter and no second copy.

What is a single number (Adam's ``step``) stays where it is and must be equal for all experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor
from torch.nn import Parameter

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy_settings import KEEP_OWNERS

PARAMETERS = "parameters"
MASTERS = "master parameters"
A_TENSOR = "a tensor"

Profile = tuple[tuple[str, str], ...]
"""What must be equal for all experts beside their tensors' sizes, sorted.

Pairs of a name and a value as text; :data:`A_TENSOR` for a state that moves.
"""

_PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ParameterState:
    """One Parameter and what this rank's optimizer keeps about it.

    Attributes:
        parameter: The Parameter's own elements, flat, all of them.
        trained: Whether some optimizer updates it.
        start: First element that the optimizer on this rank is responsible for.
        tensors: Masters and states by name, each flat and for the elements from ``start`` on.
        num_elements: Number of these elements; 0 where the rank has no part.
        profile: Settings and single numbers of the Parameter; ``None`` where the rank has no part.
    """

    parameter: Tensor
    trained: bool = False
    start: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    num_elements: int = 0
    profile: Profile | None = None


@dataclass(frozen=True)
class _Entry:
    """Where an optimizer keeps a Parameter: its key in the states, its group, its range."""

    optimizer: Any
    key: Tensor
    group: Mapping[str, Any]
    start: int
    stop: int


def parameter_states(slots: Sequence[Sequence[Parameter]], optimizer: Any) -> list[list[ParameterState]]:
    """What this rank holds of every Parameter of every slot. No communication.

    Args:
        slots: Parameters of each slot.
        optimizer: Megatron's optimizer, a ``ChainedOptimizer`` or one of the three known ones.

    Raises:
        ConfigurationError: An optimizer or a state whose contents this module cannot move.
    """
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    entries = {parameter: entry for member in optimizers for parameter, entry in _entries(member)}
    return [
        [
            _state_of(parameter, entries, [type(member).__name__ for member in optimizers])
            for parameter in slot
        ]
        for slot in slots
    ]


def _entries(optimizer: Any) -> Iterator[tuple[Parameter, _Entry | None]]:
    """Every Parameter of one optimizer; ``None`` where this rank has no part of it."""
    # Subclasses may keep more than their base.
    kind = type(optimizer)
    if getattr(optimizer, "is_stub_optimizer", False):
        return
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
        for buffer in optimizer.buffers:
            for parameter in buffer.param_to_bucket:
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
    if parameter.dtype not in _PARAMETER_DTYPES or not parameter.is_contiguous():
        raise ConfigurationError(
            f"re-sharding: got an expert's parameter of {parameter.dtype}, "
            f"{'' if parameter.is_contiguous() else 'not '}contiguous; wanted contiguous ones of "
            f"float32, bfloat16 or float16; {KEEP_OWNERS}"
        )
    flat = parameter.data.view(-1)
    if not parameter.requires_grad:
        return ParameterState(flat)
    if parameter not in entries:
        raise ConfigurationError(
            f"re-sharding: got an expert's parameter that is in none of the optimizers {optimizers}, wanted "
            "it in an FP32Optimizer, a Float16OptimizerWithFloat16Params or a DistributedOptimizer; use "
            f"Megatron's --optimizer adam or sgd, or {KEEP_OWNERS}"
        )
    entry = entries[parameter]
    if entry is None:
        return ParameterState(flat, trained=True)
    if getattr(entry.optimizer.config, "optimizer_cpu_offload", False):
        raise ConfigurationError(
            "re-sharding: got --optimizer-cpu-offload, wanted optimizer states beside their parameters: "
            f"drop the flag, or {KEEP_OWNERS}"
        )
    tensors, numbers = _sort_state(entry)
    part = flat[entry.start : entry.stop]
    master = entry.key.data.view(-1)
    if master.data_ptr() != part.data_ptr():
        tensors[MASTERS] = master
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.device != part.device or tensor.numel() != part.numel():
            raise ConfigurationError(
                f"re-sharding: got {name} of {tensor.numel()} elements of {tensor.dtype} on {tensor.device}, "
                f"wanted {part.numel()} of torch.float32 on {part.device}; keep the optimizer's states in "
                f"fp32 on the parameters' device, or {KEEP_OWNERS}"
            )
    settings = {key: value for key, value in entry.group.items() if key not in ("params", "param_names")}
    profile = {
        **{f"setting {key}": _as_text(value) for key, value in settings.items()},
        **{name: _as_text(value) for name, value in numbers.items()},
        **dict.fromkeys(tensors, A_TENSOR),
    }
    return ParameterState(
        flat, True, entry.start, tensors, entry.stop - entry.start, tuple(sorted(profile.items()))
    )


def _sort_state(entry: _Entry) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States that have an element for each of the Parameter's, and those that are single numbers."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    # Not by index: the mapping would make an empty state for a key that it does not have.
    for key, value in entry.optimizer.optimizer.state.get(entry.key, {}).items():
        name = f"state {key}"
        if not torch.is_tensor(value) or value.dim() == 0:
            numbers[name] = value
        elif value.shape == entry.key.shape and value.is_contiguous():
            tensors[name] = value.data.view(-1)
        else:
            raise ConfigurationError(
                f"re-sharding: got an optimizer with {name} of shape {tuple(value.shape)} for a parameter of "
                f"shape {tuple(entry.key.shape)}, wanted the same shape or a single number; use Megatron's "
                f"--optimizer adam or sgd, or {KEEP_OWNERS}"
            )
    return tensors, numbers


def _as_text(value: Any) -> str:
    return repr(value.tolist() if torch.is_tensor(value) else value)
