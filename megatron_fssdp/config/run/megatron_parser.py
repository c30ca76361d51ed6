"""The options of the installed Megatron-LM's argument parser.

Importing the parser takes seconds. So the options are kept in a file of the user's cache folder. Its name is
a digest of the sizes and times of Megatron's files and of the versions that its options depend on: whatever
is installed or edited makes another file.
"""

import argparse
import enum
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.quiet_output import quiet_output

_PACKAGES = ("megatron-fssdp", "megatron-core", "torch", "transformer-engine", "nvidia-modelopt")


class Parser(argparse.ArgumentParser):
    """A parser that raises a ConfigurationError where it refuses words."""

    def error(self, message: str) -> NoReturn:  # noqa: D102
        raise ConfigurationError(message)


@dataclass(frozen=True)
class Converter:
    """One of Megatron's own functions that convert a word; it is imported when a word is converted."""

    module: str
    name: str

    def __repr__(self) -> str:
        return self.name  # for argparse's messages

    def __call__(self, text: str) -> Any:
        """Convert a word as Megatron does."""
        with quiet_output():
            return getattr(importlib.import_module(self.module), self.name)(text)


@cache
def megatron_parser() -> Parser:
    """Return a parser with Megatron's options, without those of a registered plugin.

    Names stand for the items of enumerations. Every action has the ``title`` of its group.
    """
    kept = _cache_file()
    actions: list[argparse.Action] | None = None
    if kept is not None:
        with suppress(Exception):  # it is missing or damaged
            actions = pickle.loads(kept.read_bytes())
    if actions is None:
        actions = _read_actions()
        with suppress(OSError):  # a cache that cannot be written only costs time
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                partial = kept.with_suffix(f".{os.getpid()}")
                partial.write_bytes(pickle.dumps(actions))
                os.replace(partial, kept)
    parser = Parser(allow_abbrev=False, add_help=False)
    for action in actions:
        parser._add_action(action)
    return parser


def _read_actions() -> list[argparse.Action]:
    """Ask Megatron for its options, in a form that can be written to a file."""
    with quiet_output():
        from megatron.training import arguments

        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        inspect.unwrap(arguments.add_megatron_arguments)(parser)
    for action in parser._actions:
        action.title = str(getattr(action, "container").title)  # type: ignore[attr-defined]  # noqa: B009
        del action.container  # type: ignore[attr-defined]
        function: Any = action.type
        if any(isinstance(choice, enum.Enum) for choice in action.choices or ()) or "<locals>" in getattr(
            function, "__qualname__", ""
        ):
            action.type = str
        elif inspect.isfunction(function):
            action.type = Converter(function.__module__, function.__qualname__)
        if action.choices is not None:
            action.choices = [one.name if isinstance(one, enum.Enum) else one for one in action.choices]
        if isinstance(action.default, enum.Enum):
            action.default = action.default.name
    return parser._actions


def _cache_file() -> Path | None:
    """Return where the options of exactly this Megatron are kept, or None without a Megatron."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=12)
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    spec = importlib.util.find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).rglob("*.py")):
            state = path.stat()
            digest.update(f"{path} {state.st_size} {state.st_mtime_ns}".encode())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "megatron-fssdp" / f"arguments-{digest.hexdigest()}.pickle" if spec else None
