"""Copies of weights by name: checkpoints, and those that reinforcement learning and exports make.

Megatron names an expert by the place for which it registered it. After a re-shard, another expert is there,
so a copy in or out would silently mean other experts. Before a sharded state dict, all ranks bring the
experts home to Megatron's order, and the next iteration moves them back. A single rank may call
``state_dict`` and ``load_state_dict``, so these are refused, and :func:`restore_owners` brings experts home.
Hosts read Parameters by their names, too, without such a call. Known exports of theirs (:data:`EXPORTS`)
bring experts home first.
"""

import sys
from collections.abc import Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots
from megatron_fssdp.megatron_adapter.wrapping import wrap

EXPORTS = {
    # Conversion tasks may be kept and used again.
    "megatron.bridge.models.conversion.model_bridge": (
        "MegatronModelBridge",
        (
            "build_conversion_tasks",
            "build_adapter_conversion_tasks",
            "build_export_fp8_tasks",
            "stream_weights_megatron_to_hf",
            "stream_weights_megatron_to_hf_quant",
            "stream_weights_hf_to_megatron",
        ),
    ),
    "mcore_bridge.bridge.gpt_bridge": ("GPTBridge", ("export_weights", "load_weights")),
}
"""Methods by which hosts read or write experts by name, on all ranks, with the model as an argument."""

_SLOTS = "slots_of_fssdp"
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


def keep_names(experts: Any, slots: ExpertSlots) -> None:
    """Let copies of a layer's experts by name mean the experts that are there, or refuse them."""
    experts.register_state_dict_pre_hook(
        lambda _, prefix, *__: refuse_moved(slots, f"state_dict of {prefix.rstrip('.')}")
    )
    experts.register_load_state_dict_pre_hook(
        lambda _, state, prefix, *__: refuse_moved(slots, f"load_state_dict of {prefix.rstrip('.')}")
    )
    experts.sharded_state_dict = partial(_state_at_home, experts, slots)


def _state_at_home(experts: Any, slots: ExpertSlots, *args: Any, **kwargs: Any) -> dict[str, Any]:
    owners = slots.owners
    if slots.go_home():
        slots.saved_owners = owners
    state: dict[str, Any] = type(experts).sharded_state_dict(experts, *args, **kwargs)
    for entry in state.values():
        setattr(entry, _SLOTS, slots)
    return state


def slots_in(sharded_state_dict: Any) -> list[ExpertSlots]:
    """The slots whose experts are in a sharded state dict; a host may have left them out.

    Raises:
        ConfigurationError: Experts have moved since it was made.
    """
    marks = (getattr(entry, _SLOTS, None) for entry in nested_values(sharded_state_dict))
    slots_of = list({id(slots): slots for slots in marks if slots is not None}.values())
    for slots in slots_of:
        refuse_moved(slots, "checkpoint of a sharded state dict that was made before an iteration")
    return slots_of


def refuse_moved(slots: ExpertSlots, subject: str) -> None:
    """Raise a ConfigurationError if experts are not where Megatron's names and positions mean them."""
    if slots.layers and not slots.owners.is_even:
        raise ConfigurationError(
            f"{subject}: got experts that a re-shard has moved, so that their names "
            f"mean other experts; wanted experts in Megatron's order; {_RESTORE}, save in a "
            f"torch_dist checkpoint, or {KEEP_OWNERS}"
        )


def restore_owners(model: torch.nn.Module | Sequence[torch.nn.Module]) -> bool:
    """Move all experts back to where Megatron's names mean them; return whether any moved on this stage.

    All ranks must call it between two iterations: after the optimizer step and before the next forward pass.
    Optimizer states travel too. The order lasts until the strategy's next re-shard; after a checkpoint was
    saved or loaded, only until the next iteration. ``model`` is Megatron's, or its chunks.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    members = (getattr(module, "slots", None) for chunk in chunks for module in chunk.modules())
    by_id = {id(slots): slots for slots in members if isinstance(slots, ExpertSlots)}
    moved = [slots.go_home() for slots in by_id.values()]
    return any(moved)
