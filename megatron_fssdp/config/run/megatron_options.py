"""Megatron-LM's own options by the names of its parsed arguments: what exists, which values, which words.

Importing Megatron's parser takes seconds. So its options are kept in a file of the user's cache folder. The
file's name is a digest of the sizes and times of Megatron's files and of the versions that its options depend
on: whatever is installed or edited makes another file.
"""

import argparse
import enum
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import closest, describe_value
from megatron_fssdp.config.quiet_output import quiet_output

_PACKAGES = ("megatron-fssdp", "megatron-core", "torch", "transformer-engine", "nvidia-modelopt")
_MODEL_GROUPS = ("transformer", "network size", "moe", "mla", "regularization", "experimental_attention")
_KINDS: dict[str, tuple[str, tuple[type, ...], dict[str, str]]] = {
    "int": ("a whole number", (int,), {"type": "integer"}),
    "float": ("a number", (int, float), {"type": "number"}),
    "str": ("a string", (str,), {"type": "string"}),
    "bool": ("true or false", (bool,), {"type": "boolean"}),
    "": ("a string or a number", (str, int, float), {"type": "string"}),
}
"""What is wanted, the accepted Python types, and the JSON Schema, by the kind of an option."""


@dataclass(frozen=True)
class MegatronOption:
    """What Megatron's parser knows about one of its arguments.

    Attributes:
        flags: Flags that a value follows, or all flags of a switch.
        switches: Flags that stand alone, by the value that they give: ``"True"`` or ``"False"``.
        kind: A key of ``_KINDS``, or ``module:function`` of Megatron, which converts a word.
        takes_list: Whether several values can follow the flag.
        choices: Accepted values, or an empty list.
        default: Value without a flag.
        help: Megatron's help text.
        section: Section of a run's YAML to which an option of the command line belongs.
    """

    flags: list[str]
    switches: dict[str, str]
    kind: str
    takes_list: bool
    choices: list[Any]
    default: Any
    help: str
    section: str


@cache
def options() -> Mapping[str, MegatronOption]:
    """Return Megatron's options by the name of the parsed argument, for example ``moe_router_topk``."""
    kept = _cache_file()
    with suppress(OSError, ValueError, TypeError):  # it is missing or damaged
        return {name: MegatronOption(**one) for name, one in json.loads(kept.read_text("utf-8")).items()}
    found = _read_options()
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            json.dump({name: asdict(one) for name, one in found.items()}, file, default=str)
        os.replace(file.name, kept)
    return found


def unknown_option(name: str, declared: Sequence[str], own: Sequence[str]) -> str:
    """Return the message for a key that is no option.

    Args:
        name: The key.
        declared: Keys that are most likely meant.
        own: Those of them that are not arguments of Megatron.
    """
    flag = f"--{name.replace('_', '-')}"
    given = [dest for dest, option in options().items() if flag in option.flags]
    near = (*given, closest(name, declared) or closest(name, list(options())))[0]
    hint = f"did you mean '{near}'? " if near else ""
    return f"unknown key '{name}'; {hint}wanted the name of an argument of Megatron, or {', '.join(own)}"


def problem(name: str, value: Any) -> str:
    """Return what is wrong with the value of an option, or an empty text. None stands for no value."""
    option = options()[name]
    for item in _items(option, value):
        wanted, kinds, _ = _KINDS.get(option.kind, ("a value that Megatron accepts", (object,), {}))
        is_right = isinstance(item, kinds) and (not isinstance(item, bool) or kinds in ((bool,), (object,)))
        if option.kind not in _KINDS:
            try:
                with quiet_output():
                    pkgutil.resolve_name(option.kind)(_text(option, item))
            except Exception:  # Megatron's own converters raise many kinds of errors
                is_right = False
        if option.choices and item not in option.choices:
            is_right, wanted = False, f"one of {', '.join(map(str, option.choices))}"
        if not is_right:
            return f"got {describe_value(item)}, wanted {wanted}"
    return ""


def words(values: Mapping[str, Any]) -> list[str]:
    """Return the command-line words of Megatron's arguments.

    Args:
        values: Values by the names of parsed arguments, which :func:`problem` accepts. None leaves an
            argument out.

    Raises:
        ConfigurationError: The installed Megatron has no argument of a name, or no flag for a value.
    """
    result: list[str] = []
    for name, value in values.items():
        if name not in options():
            raise ConfigurationError(f"{name}: the installed Megatron has no such argument; remove the key")
        option = options()[name]
        if not option.switches or value is None:
            texts = [_text(option, item) for item in _items(option, value)]
            result += [option.flags[0], *texts] if value is not None else []
        elif str(value) in option.switches:
            result.append(option.switches[str(value)])
        elif bool(option.default) != value:
            raise ConfigurationError(f"{name}: got {value}, but Megatron has no flag for it; remove the key")
    return result


def parsed(given: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that command-line words give to Megatron, by name, as plain values.

    Raises:
        ConfigurationError: Megatron's parser refuses the words.
    """
    with quiet_output():
        parser = _megatron_parser()
    # Every default is replaced, so that only what was given is found.
    absent = argparse.Namespace(**dict.fromkeys(options(), ...))
    try:
        known, unknown = parser.parse_known_args(list(given), absent)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"Megatron refuses a value: {error or type(error).__name__}") from None
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
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
    for name, option in sorted(options().items()):
        one: dict[str, Any] = dict(_KINDS[option.kind][2]) if option.kind in _KINDS else {}
        one = {"enum": option.choices} if option.choices else one
        if option.takes_list:
            one = {"anyOf": [one, {"type": "array", "items": one}]}
        found[name] = {**one, "description": description(name)}
    return {"type": "object", "properties": found}


def description(name: str) -> str:
    """Return Megatron's help text of an option, and for a flag that switches something off its name."""
    option = options()[name]
    return f"false is {option.flags[0]}: {option.help}" if list(option.switches) == ["False"] else option.help


def _items(option: MegatronOption, value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if option.takes_list and isinstance(value, list | tuple) else (value,)


def _text(option: MegatronOption, item: Any) -> str:
    if isinstance(item, list | tuple):
        text = ",".join(map(str, item))
        return text if option.kind.endswith(":tuple_type") else f"[{text}]"
    return "" if item is False else str(item)  # argparse takes every other text for true


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


def _megatron_parser() -> argparse.ArgumentParser:
    """Return Megatron's parser, without the arguments of a registered plugin."""
    from megatron.training import arguments

    parser = _Parser(allow_abbrev=False, add_help=False)
    inspect.unwrap(arguments.add_megatron_arguments)(parser)
    return parser


def _read_options() -> dict[str, MegatronOption]:
    with quiet_output():
        actions = _megatron_parser()._actions
    found: dict[str, MegatronOption] = {}
    for action in actions:
        convert, choices = action.type, [plain(one) for one in action.choices or ()]
        kind = getattr(convert, "__qualname__", "")
        if any(isinstance(one, enum.Enum) for one in action.choices or ()) or "<locals>" in kind:
            kind = "str"
        elif inspect.isfunction(convert):
            kind = f"{convert.__module__}:{kind}"
        title = str(getattr(action, "container").title)  # noqa: B009
        section = "parallelism" if title.startswith("distributed") else "training"
        one = MegatronOption(
            flags=list(action.option_strings),
            switches={},
            kind="bool" if action.nargs == 0 else kind,
            takes_list=action.nargs not in (None, 0, "?"),
            choices=choices,
            default=plain(action.default),
            help=" ".join((action.help or "").split()) or "Megatron's argument.",
            section="model" if title.startswith(_MODEL_GROUPS) else section,
        )
        one = found.setdefault(action.dest, one)
        if isinstance(action, argparse.BooleanOptionalAction):
            one.switches.update({str(not flag.startswith("--no-")): flag for flag in action.option_strings})
        elif action.nargs == 0:
            one.switches.setdefault(str(action.const), action.option_strings[0])
    return found


def _cache_file() -> Path:
    """Return where the options of exactly this Megatron are kept."""
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
    return root / "megatron-fssdp" / f"options-{digest.hexdigest()}.json"
