"""Load-balanced MoE training strategies for stock Megatron-LM.

There are four ways to use the plugin:

- The launcher (``torchrun … -m megatron_fssdp pretrain_gpt.py …``) runs an unmodified training script.
- ``scripts/apply_patches.sh`` adds the flag ``--moe-strategy`` to a checkout of Megatron-LM.
- :func:`register` adds the plugin inside your own script.
- The spec functions (:func:`get_gpt_decoder_block_spec` and its siblings) serve models that are built from
  megatron-core's layer specs, without a command line.

Importing this package imports neither torch nor Megatron: each name is looked up when it is used first.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_fssdp.config.strategy.strategy_registry import register_strategy
    from megatron_fssdp.megatron_adapter.checkpoints.named_copies import restore_owners
    from megatron_fssdp.megatron_adapter.entry.layer_specs import (
        get_bert_layer_spec,
        get_gpt_decoder_block_spec,
        get_moe_module_spec,
        start_session,
    )
    from megatron_fssdp.megatron_adapter.entry.registration import register

try:
    __version__ = version("megatron-fssdp")
except PackageNotFoundError:  # the package is imported from its sources and was never installed
    __version__ = "0+unknown"
__all__ = [
    "get_bert_layer_spec",
    "get_gpt_decoder_block_spec",
    "get_moe_module_spec",
    "register",
    "register_strategy",
    "restore_owners",
    "start_session",
]
_LAYER_SPECS = "megatron_fssdp.megatron_adapter.entry.layer_specs"
_PLACES = {
    "register": "megatron_fssdp.megatron_adapter.entry.registration",
    "register_strategy": "megatron_fssdp.config.strategy.strategy_registry",
    "restore_owners": "megatron_fssdp.megatron_adapter.checkpoints.named_copies",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_PLACES.get(name, _LAYER_SPECS)), name)
    globals()[name] = found  # Megatron's --spec looks into the module's dictionary.
    return found
