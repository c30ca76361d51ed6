"""Turns a strategy on in any program that trains Megatron models, before it builds them.

Only megatron-core is touched. Megatron-LM's command line (:mod:`.registration`) stands on top of this.
"""

import os
from collections.abc import Mapping
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES, resolve_strategy, strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
from megatron_fssdp.megatron_adapter.iterations import core_seams
from megatron_fssdp.megatron_adapter.iterations.attachment import Attachment, current, set_current
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostSettings
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
    if not isinstance(settings or {}, Mapping):
        raise ConfigurationError(f"settings: got {settings!r}, wanted a mapping, as in {{'slots': 2}}")
    validated = strategy_settings(strategy, dict(settings or {}), "settings")
    attachment = Attachment(strategy, validated, HostSettings.of(host))
    if host is not None:
        attachment.new_session(attachment.host)
    return use(attachment)


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


def asked_by_environment() -> tuple[str | None, list[str]]:
    """Strategy and settings (``key=value``) of environment variables; ``None`` without a strategy."""
    name, settings = os.environ.get(STRATEGY_VARIABLE) or None, os.environ.get(SETTINGS_VARIABLE, "")
    pairs = [pair.strip() for pair in settings.split(",") if pair.strip()]
    if pairs and name is None:
        raise ConfigurationError(
            f"{SETTINGS_VARIABLE}: got {settings}, but no strategy, wanted both; set {STRATEGY_VARIABLE}"
        )
    return name, pairs


def add_strategy_options(to: Any) -> None:
    """Add ``--moe-strategy`` and its settings to a parser or a group; the environment has their defaults."""
    name, settings = asked_by_environment()
    strategies = "; ".join(f"{strategy} ({entry.summary})" for strategy, entry in STRATEGIES.items())
    to.add_argument(
        "--moe-strategy",
        default=name or "none",
        metavar="NAME",
        # argparse formats help texts with the % operator, so a per cent sign must be doubled.
        help=f"How experts are placed: {strategies}.".replace("%", "%%"),
    )
    to.add_argument(
        "--moe-strategy-config",
        metavar="FILE.yaml",
        help="YAML file with the settings of the strategy, one flat key per line.",
    )
    to.add_argument(
        "--moe-strategy-set",
        metavar="KEY=VALUE",
        action="append",
        default=settings,
        help="One setting of the strategy, for example slots=2. It can be repeated and overrides the file.",
    )


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
