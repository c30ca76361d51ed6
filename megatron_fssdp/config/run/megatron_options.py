"""Megatron-LM's own options by the names of its parsed arguments: what exists, which values, which words.

Importing Megatron's parser takes seconds. So its options are kept in a file of the user's cache folder.
Whatever the parser refuses is a :class:`ConfigurationError`.
"""

import argparse
import enum
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import closest, describe_value

_PACKAGES = ("megatron-fssdp", "megatron-core", "torch", "transformer-engine", "nvidia-modelopt")
_MODEL_GROUPS = ("transformer", "network size", "moe", "mla", "regularization", "experimental_attention")


@cache
def options() -> Mapping[str, argparse.Action]:
    """Return Megatron's options by the name of the parsed argument, for example ``moe_router_topk``."""
    return {action.dest: action for action in reversed(megatron_parser()._actions)}


def section_of(name: str) -> str:
    """Return the section of a run's YAML for an option that has been given on a command line."""
    title = str(vars(options()[name])["title"])
    if title.startswith(_MODEL_GROUPS):
        return "model"
    return "parallelism" if title.startswith("distributed") else "training"


def unknown_option(name: str, declared: Sequence[str], own: Sequence[str]) -> str:
    """Return the message for a key that is neither an option nor one of the package's ``own``."""
    flag = f"--{name.replace('_', '-')}"
    given = [dest for dest, action in options().items() if flag in action.option_strings]
    near = (*given, closest(name, declared) or closest(name, list(options())))[0]
    hint = f"did you mean '{near}'? " if near else ""
    return f"unknown key '{name}'; {hint}wanted the name of an argument of Megatron, or {', '.join(own)}"


def problem(name: str, value: Any) -> str:
    """Return what Megatron's parser says against the value of an option, or an empty text."""
    try:
        parsed(words({name: value}))
    except ConfigurationError as error:
        flags = "/".join(options()[name].option_strings)
        return str(error).removeprefix(f"argument {flags}: ").removeprefix(f"{name}: ")
    return ""


def words(values: Mapping[str, Any]) -> list[str]:
    """Return the command-line words of Megatron's arguments; None and an empty list leave one out."""
    result: list[str] = []
    for name, value in values.items():
        if name not in options():
            raise ConfigurationError(f"{name}: the installed Megatron has no such argument; remove the key")
        action = options()[name]
        if value is None or value == []:
            continue
        if action.nargs == 0:
            result += _switch(name, value)
            continue
        items = value if isinstance(value, list | tuple) and _takes_list(action) else [value]
        if any(isinstance(item, dict | list | tuple) and action.type in (None, str) for item in items):
            raise ConfigurationError(f"{name}: got {describe_value(items[0])}, wanted a string or a number")
        result += [action.option_strings[0], *(_text(action, item) for item in items)]
    return result


def parsed(given: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that command-line words give to Megatron, by name, as plain values."""
    absent = argparse.Namespace(**dict.fromkeys(options(), ...))  # in the place of every default
    try:
        known, unknown = megatron_parser().parse_known_args(list(given), absent)
    except argparse.ArgumentError as error:
        raise ConfigurationError(str(error)) from None
    except Exception as error:  # Megatron's own converters raise many kinds of errors
        raise ConfigurationError(f"Megatron refuses a value: {error or type(error).__name__}") from None
    if unknown:
        flags = [flag for action in megatron_parser()._actions for flag in action.option_strings]
        near = "" if unknown[0].startswith("--moe-strategy") else closest(unknown[0], flags)
        raise ConfigurationError(
            f"Megatron has no argument {unknown[0]}; "
            + (f"did you mean {near}?" if near else "options of megatron-fssdp stand before --")
        )
    return {name: plain(value) for name, value in vars(known).items() if value is not ...}


def plain(value: Any) -> Any:
    """Return a parsed value as YAML has it: names of enumerations, lists, and the item of a list of one."""
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return items[0] if len(items) == 1 else items
    return value.name if isinstance(value, enum.Enum) else value


def description(name: str) -> str:
    """Return Megatron's help text of an option, and for a flag that switches something off its name."""
    action = options()[name]
    text = " ".join((action.help or "Megatron's argument.").split())
    return f"false is {action.option_strings[0]}: {text}" if action.const is False else text


def _takes_list(action: argparse.Action) -> bool:
    return action.nargs not in (None, 0, "?")


def _switch(name: str, value: Any) -> list[str]:
    """Return the flag that gives a switch a value; none if it has the value without a flag."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}: got {describe_value(value)}, wanted true or false")
    for action in megatron_parser()._actions:
        if action.dest != name:
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            return [next(flag for flag in action.option_strings if flag.startswith("--no-") != value)]
        if action.const is value:
            return [action.option_strings[0]]
    if bool(options()[name].default) != value:
        raise ConfigurationError(f"{name}: got {value}, but Megatron has no flag for it; remove the key")
    return []


def _text(action: argparse.Action, item: Any) -> str:
    if isinstance(item, list | tuple):
        text = ",".join(map(str, item))
        return text if getattr(action.type, "name", "") == "tuple_type" else f"[{text}]"
    return "" if item is False else str(item)  # argparse takes every other text for true


@contextmanager
def quiet_output() -> Iterator[None]:
    """Inside this context nothing is printed. Megatron warns about packages that are missing here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Converter:
    """One of Megatron's own functions that convert a word; it is imported when a word is converted."""

    module: str
    name: str

    def __repr__(self) -> str:
        return self.name  # for argparse's messages

    def __call__(self, text: str) -> Any:  # noqa: D102
        with quiet_output():
            return getattr(importlib.import_module(self.module), self.name)(text)


@cache
def megatron_parser() -> argparse.ArgumentParser:
    """Return a parser with Megatron's options, without those of a registered plugin."""
    kept = _cache_file()
    actions: list[argparse.Action] | None = None
    with suppress(Exception):  # it is missing or damaged
        actions = pickle.loads(kept.read_bytes())
    if actions is None:
        actions = _read_actions()
        with suppress(OSError):  # a cache that cannot be written only costs time
            kept.parent.mkdir(parents=True, exist_ok=True)
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_bytes(pickle.dumps(actions))
            os.replace(partial, kept)
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for action in actions:
        parser._add_action(action)
    return parser


def _read_actions() -> list[argparse.Action]:
    """Ask Megatron for its options in a form that can be kept; names stand for items of enumerations."""
    with quiet_output():
        from megatron.training import arguments

        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        inspect.unwrap(arguments.add_megatron_arguments)(parser)
    for action in parser._actions:
        action.title = str(getattr(action, "container").title)  # type: ignore[attr-defined]  # noqa: B009
        del action.container  # type: ignore[attr-defined]
        if "<locals>" in getattr(action.type, "__qualname__", ""):
            action.type = str  # this function makes items of an enumeration, for which their names stand
        elif inspect.isfunction(action.type):
            action.type = Converter(action.type.__module__, action.type.__qualname__)
        if action.choices is not None:
            action.choices = [
                choice.name if isinstance(choice, enum.Enum) else choice for choice in action.choices
            ]
        if isinstance(action.default, enum.Enum):
            action.default = action.default.name
    return parser._actions


def _cache_file() -> Path:
    """Return where the options of exactly this Megatron are kept: whatever is edited makes another file."""
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
    return root / "megatron-fssdp" / f"arguments-{digest.hexdigest()}.pickle"
