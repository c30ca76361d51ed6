"""Megatron-LM's own options by the names of its parsed arguments: what exists, which values, which words."""

import argparse
import enum
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import closest, describe_value
from megatron_fssdp.config.run.megatron_parser import Converter, megatron_parser

_KINDS: dict[Any, tuple[str, tuple[type, ...], str]] = {
    int: ("a whole number", (int,), "integer"),
    float: ("a number", (int, float), "number"),
    str: ("a string", (str,), "string"),
    bool: ("true or false", (bool,), "boolean"),
    None: ("a string or a number", (str, int, float), "string"),
}
"""What is wanted, the accepted Python types, and JSON Schema's type, by the type of an option."""

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
    """Return the message for a key that is no option.

    Args:
        name: The key.
        declared: Keys that are most likely meant.
        own: Those of them that are not arguments of Megatron.
    """
    flag = f"--{name.replace('_', '-')}"
    given = [dest for dest, action in options().items() if flag in action.option_strings]
    near = (*given, closest(name, declared) or closest(name, list(options())))[0]
    hint = f"did you mean '{near}'? " if near else ""
    return f"unknown key '{name}'; {hint}wanted the name of an argument of Megatron, or {', '.join(own)}"


def problem(name: str, value: Any) -> str:
    """Return what is wrong with the value of an option, or an empty text. None stands for no value."""
    action = options()[name]
    if value is None:
        return ""
    if action.nargs == 0:
        return "" if isinstance(value, bool) else f"got {describe_value(value)}, wanted true or false"
    for item in value if _takes_list(action) and isinstance(value, list | tuple) else (value,):
        wanted, kinds, _ = _KINDS.get(action.type, ("a value that Megatron accepts", (object,), ""))
        is_right = isinstance(item, kinds) and (not isinstance(item, bool) or kinds in ((bool,), (object,)))
        if is_right and kinds == (object,):
            try:
                assert callable(action.type)
                action.type(_text(action, item))
            except Exception:  # Megatron's own converters raise many kinds of errors
                is_right = False
        if action.choices and item not in action.choices:
            is_right, wanted = False, f"one of {', '.join(map(str, action.choices))}"
        if not is_right:
            return f"got {describe_value(item)}, wanted {wanted}"
    return ""


def words(values: Mapping[str, Any]) -> list[str]:
    """Return the command-line words of Megatron's arguments.

    Args:
        values: Values by the names of parsed arguments. None leaves an argument out.

    Raises:
        ConfigurationError: A name or value is none of Megatron's.
    """
    result: list[str] = []
    for name, value in values.items():
        value = str(value) if isinstance(value, Path) else value
        if name not in options():
            raise ConfigurationError(f"{name}: the installed Megatron has no such argument; remove the key")
        action = options()[name]
        if not isinstance(action.type, Converter) and (found := problem(name, value)):
            raise ConfigurationError(f"{name}: {found}")
        if isinstance(value, bool) and action.nargs == 0:
            result += _switch(name, value)
        elif value is not None:
            items = value if isinstance(value, list | tuple) and _takes_list(action) else [value]
            result += [action.option_strings[0], *(_text(action, item) for item in items)]
    return result


def parsed(given: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that command-line words give to Megatron, by name, as plain values.

    Raises:
        ConfigurationError: Megatron's parser refuses the words.
    """
    # Every default is replaced, so that only what was given is found.
    absent = argparse.Namespace(**dict.fromkeys(options(), ...))
    try:
        known, unknown = megatron_parser().parse_known_args(list(given), absent)
    except ConfigurationError:
        raise
    except Exception as error:
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


def schema() -> dict[str, Any]:
    """Return a JSON Schema of all options."""
    found: dict[str, Any] = {}
    for name, action in sorted(options().items()):
        kind = "boolean" if action.nargs == 0 else _KINDS.get(action.type, ("", (), ""))[2]
        one: dict[str, Any] = {"type": kind} if kind else {}
        if action.choices:
            one = {"enum": list(action.choices)}
        if _takes_list(action):
            one = {"anyOf": [one, {"type": "array", "items": one}]}
        found[name] = {**one, "description": description(name)}
    return {"type": "object", "properties": found}


def description(name: str) -> str:
    """Return Megatron's help text of an option, and for a flag that switches something off its name."""
    action = options()[name]
    text = " ".join((action.help or "").split()) or "Megatron's argument."
    return f"false is {action.option_strings[0]}: {text}" if action.const is False else text


def _takes_list(action: argparse.Action) -> bool:
    return action.nargs not in (None, 0, "?")


def _switch(name: str, value: bool) -> list[str]:
    """Return the flag that gives a switch a value; none if it has the value without a flag."""
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
