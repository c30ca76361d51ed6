"""Load-balanced MoE training strategies for stock Megatron-LM.

All ways to use the plugin lead to :func:`attach`, which needs nothing but megatron-core:

- The launcher (``torchrun … -m megatron_fssdp SCRIPT.py …``) runs an unmodified script of any host.
- ``scripts/apply_patches.sh`` adds the flag ``--moe-strategy`` to a checkout of Megatron-LM.
- :func:`register` adds that flag inside your own script for Megatron-LM.
- ``attach("fssdp")``, or :func:`attach_from_environment`, before a program builds its model.

Importing this package imports neither torch nor Megatron: each name is looked up when it is used first.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_fssdp.config.strategy.strategy_registry import register_strategy
    from megatron_fssdp.megatron_adapter.entry.attach import attach, attach_from_environment
    from megatron_fssdp.megatron_adapter.entry.registration import register
    from megatron_fssdp.megatron_adapter.experts.named_copies import restore_owners

try:
    __version__ = version("megatron-fssdp")
except PackageNotFoundError:  # the package is imported from its sources and was never installed
    __version__ = "0+unknown"
__all__ = ["attach", "attach_from_environment", "register", "register_strategy", "restore_owners"]
_ATTACH = "megatron_fssdp.megatron_adapter.entry.attach"
_PLACES = {
    "attach": _ATTACH,
    "attach_from_environment": _ATTACH,
    "register": "megatron_fssdp.megatron_adapter.entry.registration",
    "register_strategy": "megatron_fssdp.config.strategy.strategy_registry",
    "restore_owners": "megatron_fssdp.megatron_adapter.experts.named_copies",
}
_REPLACED = ("start_session", "get_gpt_decoder_block_spec", "get_moe_module_spec", "get_bert_layer_spec")


def __getattr__(name: str) -> Any:
    if name in _REPLACED:
        raise AttributeError(
            f"megatron_fssdp.{name} is no more: call megatron_fssdp.attach(strategy, settings) before the "
            "model is built, from Megatron's own specs"
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_fssdp.megatron_adapter.support.capabilities import naming_missing_seams

    with naming_missing_seams():
        return getattr(import_module(_PLACES[name]), name)
