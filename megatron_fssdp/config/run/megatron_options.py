"""Megatron-LM's own options by the names of its parsed arguments: what exists, which values, which words.

The installed Megatron's parser is asked, so every option of every version can stand in a run's YAML. Its
import takes seconds, so it waits until an option is checked that no settings model declares.
"""

import argparse
import enum
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import closest, describe_value

_KINDS: dict[Any, tuple[str, tuple[type, ...], str]] = {
    int: ("a whole number", (int,), "integer"),
    float: ("a number", (int, float), "number"),
    str: ("a string", (str,), "string"),
    bool: ("true or false", (bool,), "boolean"),
    None: ("a string or a number", (str, int, float), "string"),
}
_MODEL_GROUPS = ("transformer", "network size", "moe", "mla", "regularization", "experimental_attention")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Megatron's import from writing about packages that are missing on this machine."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@cache
def _parser() -> _Parser:
    with _quiet():
        from megatron.training import arguments

        parser = _Parser(allow_abbrev=False, add_help=False)
        # Without a registered plugin's own options, which have a section of their own.
        inspect.unwrap(arguments.add_megatron_arguments)(parser)
    return parser


@cache
def options() -> Mapping[str, argparse.Action]:
    """Return Megatron's options by the name of the parsed argument, for example ``moe_router_topk``."""
    return {action.dest: action for action in reversed(_parser()._actions)}


def section_of(name: str) -> str:
    """Return the section of a run's YAML for an option that has been given on a command line."""
    title = str(getattr(options()[name], "container", argparse.Namespace(title="")).title)
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
    takes_list = action.nargs not in (None, "?")
    for item in value if takes_list and isinstance(value, list | tuple) else (value,):
        wanted, kinds, _ = _KINDS.get(action.type, ("", (object,), ""))
        is_right = isinstance(item, kinds) and (not isinstance(item, bool) or kinds in ((bool,), (object,)))
        parsed = item
        if is_right and kinds == (object,):
            try:
                parsed = action.type(_text(action, item)) if callable(action.type) else item
            except Exception:  # Megatron's own converters raise many kinds of errors
                is_right = False
        choices = list(action.choices or ())
        if choices and parsed not in choices:
            is_right, wanted = False, f"one of {', '.join(map(_plain, choices))}"
        if not is_right:
            return f"got {describe_value(item)}, wanted {wanted or 'a value that Megatron accepts'}"
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
        if found := problem(name, value):
            raise ConfigurationError(f"{name}: {found}")
        action = options()[name]
        if isinstance(value, bool) and action.nargs == 0:
            result += _switch(name, value)
        elif value is not None:
            items = value if isinstance(value, list | tuple) and action.nargs not in (None, "?") else [value]
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
        known, unknown = _parser().parse_known_args(list(given), absent)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"Megatron refuses a value: {error or type(error).__name__}") from None
    if unknown:
        flags = [flag for action in _parser()._actions for flag in action.option_strings]
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
        _, kinds, kind = _KINDS.get(action.type, ("", (), ""))
        one: dict[str, Any] = {"type": "boolean"} if action.nargs == 0 else {"type": kind} if kind else {}
        if action.choices:
            one = {"enum": [_plain(choice) if kinds != (int,) else choice for choice in action.choices]}
        if action.nargs not in (None, 0, "?"):
            one = {"anyOf": [one, {"type": "array", "items": one}]}
        found[name] = {**one, "description": description(name)}
    return {"type": "object", "properties": found}


def description(name: str) -> str:
    """Return Megatron's help text of an option, and for a flag that switches something off its name."""
    action = options()[name]
    text = " ".join((action.help or "").split()) or "Megatron's argument."
    return f"false is {action.option_strings[0]}: {text}" if action.const is False else text


def _switch(name: str, value: bool) -> list[str]:
    """Return the flag that gives a switch a value; none if it has the value without a flag."""
    for action in _parser()._actions:
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
        return text if getattr(action.type, "__name__", "") == "tuple_type" else f"[{text}]"
    return "" if item is False else str(item)  # argparse takes every other text for true


def _plain(choice: Any) -> str:
    return choice.name if isinstance(choice, enum.Enum) else str(choice)
