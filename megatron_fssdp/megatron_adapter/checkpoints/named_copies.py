"""Copies of weights by name, as reinforcement learning and exports make them in the middle of a training.

``state_dict`` and ``load_state_dict`` name an expert by the place for which Megatron registered it. After a
re-shard, another expert is there, so a copy in or out would silently mean other experts. Both are refused
then, and :func:`restore_owners` brings all experts back to Megatron's order. Hosts read Parameters by their
names, too, without such a call. Known exports of theirs (:data:`EXPORTS`) bring experts back first.
"""

import sys
from collections.abc import Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots
from megatron_fssdp.megatron_adapter.wrapping import wrap

EXPORTS = {
    # Conversion tasks may be kept and used again.
    "megatron.bridge.models.conversion.model_bridge": (
        "MegatronModelBridge",
        ("build_conversion_tasks", "stream_weights_megatron_to_hf", "stream_weights_hf_to_megatron"),
    ),
    "mcore_bridge.bridge.gpt_bridge": ("GPTBridge", ("export_weights", "load_weights")),
}
"""Methods by which hosts read or write experts by name, on all ranks, with the model as an argument."""

_RESTORE = "call megatron_fssdp.restore_owners(model) on all ranks between two iterations"


@cache  # once in a process
def install_exports() -> None:
    """Bring experts home before the known exports of hosts, also of hosts that are imported later."""
    for name in EXPORTS:
        if name in sys.modules:
            _wrap_exports(name)
    sys.meta_path.insert(0, _Imports())


class _Imports:
    """Wraps the exports of a module when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in EXPORTS:
            return None
        sys.meta_path.remove(self)
        try:
            spec: Any = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module, name)
        return spec


def _execute(execute: Any, name: str, module: Any) -> None:
    execute(module)
    _wrap_exports(name)


def _wrap_exports(name: str) -> None:
    kind, methods = EXPORTS[name]
    for method in methods:
        wrap(getattr(sys.modules[name], kind), method, _restored)


def _restored(export: Any, *args: Any, **kwargs: Any) -> Any:
    for given in (*args, *kwargs.values()):
        chunks = given if isinstance(given, list | tuple) else [given]
        if chunks and all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
            restore_owners(chunks)
    return export(*args, **kwargs)


def check_named_copies(experts: torch.nn.Module, layer: int, slots: ExpertSlots) -> None:
    """Make the experts of a layer of the owner map refuse copies by name while names and contents disagree.

    Megatron's own loading of a ``torch_dist`` checkpoint has put the right contents under the names.
    """

    def before_state_dict(module: Any, prefix: str, *_: Any) -> None:
        refuse_moved(slots, f"state_dict of {prefix.rstrip('.')}")

    def before_load(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        if layer in slots.loading:
            slots.loading.remove(layer)
            return
        refuse_moved(slots, f"load_state_dict of {prefix.rstrip('.')}")
        if slots.has_residents:
            raise ConfigurationError(
                f"load_state_dict of {prefix.rstrip('.')}: got resident replicas, which would keep their old "
                "weights; wanted weights that are loaded before the first iteration; use another strategy "
                "than flexmoe to load them later"
            )

    experts.register_state_dict_pre_hook(before_state_dict)
    experts.register_load_state_dict_pre_hook(before_load)


def refuse_moved(slots: ExpertSlots, what: str) -> None:
    """Raise a ConfigurationError if experts are not where Megatron's names and positions mean them."""
    if slots.layers and not slots.owners.is_even:
        raise ConfigurationError(
            f"{what}: got experts that a re-shard has moved, so that their names "
            f"mean other experts; wanted experts in Megatron's order; {_RESTORE}, save in a fully "
            f"reshardable torch_dist checkpoint, or {KEEP_OWNERS}"
        )


def restore_owners(model: torch.nn.Module | Sequence[torch.nn.Module]) -> bool:
    """Move all experts back to where Megatron's names mean them; return whether any moved on this stage.

    All ranks must call it between two iterations: after the optimizer step and before the next forward pass.
    Optimizer states travel too. The order lasts until the strategy's next re-shard. ``model`` is Megatron's,
    or its chunks.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    members = (getattr(module, "slots", None) for chunk in chunks for module in chunk.modules())
    found = {id(slots): slots for slots in members if isinstance(slots, ExpertSlots)}
    moved = [slots.go_home() for slots in found.values()]
    return any(moved)
