"""Turns a strategy on in any program that trains Megatron models, before it builds them.

Only megatron-core is touched. Megatron-LM's command line (:mod:`.registration`) stands on top of this.
"""

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import gpt_layer_specs

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import resolve_strategy, strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
from megatron_fssdp.megatron_adapter.iterations import core_seams
from megatron_fssdp.megatron_adapter.iterations.attachment import Attachment, current, set_current
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostSettings
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.megatron_adapter.support import megatron_repairs
from megatron_fssdp.megatron_adapter.support.capabilities import check_seams

STRATEGY_VARIABLE = "MEGATRON_FSSDP_STRATEGY"
SETTINGS_VARIABLE = "MEGATRON_FSSDP_SETTINGS"


def attach(strategy: str, settings: Mapping[str, Any] | None = None, *, host: Any = None) -> Attachment:
    """Let models train under a strategy: those that Megatron's DDP wraps from now on.

    Call it on all ranks, before the model is built; no other call is needed. ``settings`` have the keys of
    the strategy's YAML file. Each model has iterations, owners and records of its own;
    :attr:`Attachment.models` has them. ``none`` lets later models be Megatron's own. On a machine without an
    accelerator, Megatron runs on the CPU.

    ``host`` is Megatron-Bridge's ``ConfigContainer``, or another object whose settings, or those of its
    sections, have Megatron's names. What the strategy cannot serve is then refused here, before the model is
    built.

    Raises:
        ConfigurationError: A name or value is invalid, or the installed megatron-core lacks a seam.
    """
    found = strategy_settings(strategy, dict(settings or {}), "settings")
    told = HostSettings.of(host)
    if host is not None and isinstance(found, PlacementSettings):
        StrategySession(strategy, found).check_model(*told.sources)
    return use(Attachment(strategy, found, told))


def attach_from_environment(*_: Any, **__: Any) -> Attachment | None:
    """Attach what ``MEGATRON_FSSDP_STRATEGY`` and ``MEGATRON_FSSDP_SETTINGS=slots=2,…`` ask for, if anything.

    Hosts that call a function of the user's (slime's ``--custom-megatron-init-path``) can name this one; its
    arguments do not matter.
    """
    name, settings = asked_by_environment()
    if name is None:
        return None
    known = current()
    if known is not None and known.name == name:
        return known
    return use(Attachment(name, resolve_strategy(name, None, settings)))


def get_gpt_decoder_block_spec(
    *given: Any,
    vp_stage: int | None = None,  # Megatron looks for this name in the signature.
    strategy: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return Megatron's GPT decoder block spec of this pipeline stage, after a strategy is attached.

    Hosts take it by name, as in ``--spec megatron_fssdp get_gpt_decoder_block_spec``, and so import the
    plugin on every rank, also in Ray workers. The strategy is ``strategy`` with its ``settings``, else that
    of the command line, or of the environment. Positional arguments are those of Megatron's function,
    ``config`` and ``use_transformer_engine``, or those of slime: parsed arguments, ``config`` and the stage.
    Transformer Engine is used by default if it is there and the config asks for it.

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


def asked_by_environment() -> tuple[str | None, list[str]]:
    """Strategy and settings (``key=value``) of environment variables; ``None`` without a strategy."""
    name, settings = os.environ.get(STRATEGY_VARIABLE) or None, os.environ.get(SETTINGS_VARIABLE, "")
    pairs = [pair.strip() for pair in settings.split(",") if pair.strip()]
    if pairs and name is None:
        raise ConfigurationError(
            f"{SETTINGS_VARIABLE}: got {settings}, but no strategy, wanted both; set {STRATEGY_VARIABLE}"
        )
    return name, pairs


def use(attachment: Attachment) -> Attachment:
    """Install all seams of megatron-core, once, and attach a strategy."""
    on_cpu = cpu_runtime.install()
    check_seams(for_training=False)
    megatron_repairs.install()
    core_seams.install()
    if not on_cpu and isinstance(attachment.settings, PlacementSettings):
        # NCCL asks for it where communicators are used at the same time; before 2.26 it is ignored.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    set_current(attachment)
    return attachment
