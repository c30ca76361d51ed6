"""Load-balanced MoE training strategies for stock Megatron-LM.

Three ways in: the launcher (``torchrun … -m megatron_fssdp pretrain_gpt.py …``) for
unmodified scripts, :func:`register` for a script of one's own, and the spec functions for
models built from megatron-core's layer specs without any command line. Importing this
package imports neither torch nor Megatron.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("megatron-fssdp")
except PackageNotFoundError:  # imported from its sources, and never installed
    __version__ = "0+unknown"
__all__ = [
    "get_bert_layer_spec",
    "get_gpt_decoder_block_spec",
    "get_moe_module_spec",
    "register",
    "start_session",
]


def register() -> None:
    """Add the plugin to Megatron; call it before Megatron parses its arguments.

    On a machine without an accelerator this also lets Megatron run on the CPU, see
    ``megatron_adapter.cpu.cpu_runtime``.
    """
    from megatron_fssdp.megatron_adapter.entry import registration

    registration.register()


def start_session(strategy: str, settings: Any = None) -> Any:
    """Start a strategy for one model's layers; see ``megatron_adapter.entry.layer_specs``."""
    from megatron_fssdp.megatron_adapter.entry import layer_specs

    return layer_specs.start_session(strategy, settings)


def get_moe_module_spec(*args: Any, **kwargs: Any) -> Any:
    """Megatron's MoE module spec with a strategy in it; see ``megatron_adapter.entry.layer_specs``."""
    from megatron_fssdp.megatron_adapter.entry import layer_specs

    return layer_specs.get_moe_module_spec(*args, **kwargs)


def get_gpt_decoder_block_spec(
    config: Any, use_transformer_engine: bool | None = None, *, vp_stage: int | None = None, **kwargs: Any
) -> Any:
    """Megatron's decoder block spec with a strategy in it; see ``megatron_adapter.entry.layer_specs``."""
    from megatron_fssdp.megatron_adapter.entry import layer_specs

    return layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine, vp_stage=vp_stage, **kwargs)


def get_bert_layer_spec(config: Any, use_transformer_engine: bool | None = None, **kwargs: Any) -> Any:
    """A spec of Megatron's BERT layers with a strategy in it; see ``megatron_adapter.entry.layer_specs``."""
    from megatron_fssdp.megatron_adapter.entry import layer_specs

    return layer_specs.get_bert_layer_spec(config, use_transformer_engine, **kwargs)
