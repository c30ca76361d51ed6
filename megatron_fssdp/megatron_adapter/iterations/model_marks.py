"""Tells to which model DDP chunks, their buffers and Parameters, and optimizers belong."""

import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_fssdp.megatron_adapter.experts.slot_quantities import members_of

if TYPE_CHECKING:
    from megatron_fssdp.megatron_adapter.iterations.model_iterations import ModelIterations

_MODEL = "model_of_fssdp"
_built: weakref.WeakSet[Any] = weakref.WeakSet()  # Optimizers; those of a chained one are in it, too.


def mark(held: Iterable[Any], model: "ModelIterations") -> None:
    """Mark what belongs to a model, which lives as long as these."""
    for marked in held:
        setattr(marked, _MODEL, model)


def model_of(marked: Any) -> "ModelIterations | None":
    """The model of a marked object."""
    return getattr(marked, _MODEL, None)


def note_optimizer(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Build an optimizer, and note it."""
    init(self, *args, **kwargs)
    _built.add(self)


def optimizer_of(model: "ModelIterations") -> Any:
    """The optimizer that has a model's parameters; several are returned as one; ``None`` without any."""
    of_model = [optimizer for optimizer in _built if model in models_of(optimizer)]
    inner = {id(member) for chain in of_model for member in getattr(chain, "chained_optimizers", ())}
    outer = [optimizer for optimizer in of_model if id(optimizer) not in inner]
    if len(outer) > 1:
        return SimpleNamespace(chained_optimizers=outer, config=outer[0].config)
    return outer[0] if outer else None


def models_of(optimizer: Any) -> list["ModelIterations"]:
    """The models whose parameters an optimizer has."""
    if (known := getattr(optimizer, _MODEL, None)) is None:
        known = list({id(model): model for model in _searched(optimizer)}.values())
        setattr(optimizer, _MODEL, known)
    return known


def _searched(optimizer: Any) -> Iterator["ModelIterations"]:
    for member in members_of(optimizer):
        groups = [getattr(member, name, ()) for name in ("float16_groups", "fp32_from_fp32_groups")]
        held = [
            *getattr(member, "buffers", ()),
            *(parameter for group in groups for part in group for parameter in part),
        ]
        if (inner := getattr(member, "optimizer", None)) is not None:
            held += [parameter for group in inner.param_groups for parameter in group["params"]]
        yield from (model for parameter in held if (model := model_of(parameter)) is not None)
