"""A layer spec for hosts that take one by name: ``--spec megatron_fssdp get_gpt_decoder_block_spec``.

The spec is Megatron's own. To name it is a way to import the plugin on every rank, also in Ray workers.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import gpt_layer_specs

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.entry.attach import attach, attach_from_environment
from megatron_fssdp.megatron_adapter.iterations.attachment import current


def get_gpt_decoder_block_spec(
    *given: Any,
    vp_stage: int | None = None,  # Megatron looks for this name in the signature.
    strategy: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return Megatron's GPT decoder block spec of this pipeline stage, after a strategy is attached.

    The strategy is ``strategy`` with its ``settings``, else that of the command line, or of the environment.
    Positional arguments are those of Megatron's function, ``config`` and ``use_transformer_engine``, or those
    of slime: parsed arguments, ``config`` and the stage. Transformer Engine is used by default if it is there
    and the config asks for it.

    Raises:
        ConfigurationError: Nothing asks for a strategy.
    """
    if strategy is not None:
        attach(strategy, settings)
    elif current() is None and attach_from_environment() is None:
        raise ConfigurationError(
            "spec: got no strategy, wanted one; pass a name such as strategy='fssdp', set "
            "MEGATRON_FSSDP_STRATEGY, or start the script with python -m megatron_fssdp and --moe-strategy"
        )
    if isinstance(given[0], Namespace):  # slime's form: (args, config, vp_stage)
        given, vp_stage = given[1:2], given[2] if len(given) > 2 else vp_stage
    config, *rest = given
    uses_te = options.pop("use_transformer_engine", rest[0] if rest else None)
    if uses_te is None:
        uses_te = HAVE_TE and config.transformer_impl == "transformer_engine"
    wanted = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm, **options}
    return gpt_layer_specs.get_gpt_decoder_block_spec(config, uses_te, vp_stage=vp_stage, **wanted)
