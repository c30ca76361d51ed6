"""Refuses options of Megatron that this version of the plugin does not know.

``known_options.txt`` names all fields of Megatron's configs and all its arguments that were looked at. Others
may change what layers of experts do, so they may only have their defaults. A Megatron that lacks what
:mod:`.megatron_settings` reads is refused too, because it may have it under another name.
"""

import copy
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.support.capabilities import pip_install
from megatron_fssdp.megatron_adapter.support.megatron_settings import OPTIONAL, attributes

ALLOWED = "MEGATRON_FSSDP_ALLOW"  # Names of unknown options that a user allows, separated by commas.


@cache
def known_options() -> frozenset[str]:
    """Return the names in the file. Its sections say to readers why a name is known."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    return frozenset(name for line in lines if line[:1] not in ("#", "[") for name in line.split())


def field_defaults(config: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields that megatron.core declares; hosts may add others.

    Configs of datasets do not count: what layers of experts do does not depend on them.
    """
    found: dict[str, Any] = {}
    for kind in reversed(type(config).__mro__):
        is_core = kind.__module__.startswith("megatron.core.")
        if is_core and not kind.__module__.startswith("megatron.core.datasets.") and is_dataclass(kind):
            for field in fields(kind):
                made = None if field.default_factory is MISSING else field.default_factory()
                found[field.name] = made if field.default is MISSING else field.default
    return found


def check_known(who: str, settings: Any, defaults: Mapping[str, Any] | None = None) -> None:
    """Refuse, by a ConfigurationError, an unknown option without its default that ``ALLOWED`` does not name.

    The settings are Megatron's arguments with their ``defaults``, or a config, whose classes have them.
    """
    defaults = field_defaults(settings) if defaults is None else defaults
    kinds = {kind.__name__ for kind in type(settings).__mro__} if defaults else set()
    for name, classes in attributes().items():
        if kinds & classes and OPTIONAL not in classes and name not in defaults:
            raise ConfigurationError(
                f"{who}: got a Megatron whose {type(settings).__name__} has no {name}, on which refusals "
                f"depend, wanted a tested version: {pip_install('megatron-core')}"
            )
    allowed = os.environ.get(ALLOWED, "").replace(",", " ").split()
    for name in sorted(defaults.keys() - known_options() - set(allowed)):
        default = defaults[name]
        got, wanted = (" ".join(repr(value).split()) for value in (getattr(settings, name, default), default))
        if got != wanted and not _is_derived(settings, name, default, got):
            raise ConfigurationError(
                f"{who}: {name}: got {got:.80}, which this version of megatron_fssdp does not know, wanted "
                f"its default {wanted:.80}; remove it, tell us, or set {ALLOWED}={','.join([*allowed, name])}"
            )


def _is_derived(config: Any, name: str, default: Any, got: str) -> bool:
    """Whether ``__post_init__`` of a config makes this value of the default by itself."""
    again = copy.copy(config)
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        setattr(again, name, default)
        again.__post_init__()
        return " ".join(repr(getattr(again, name)).split()) == got
    return False
