"""From YAML text and ``key=value`` overrides to a validated settings model.

Everything a user can get wrong here ends as one line in a :class:`ConfigurationError`.
"""

import difflib
import json
import re
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_fssdp.config.errors import ConfigurationError

_MAX_ERRORS_SHOWN = 4

_TYPE_NAMES: dict[type, str] = {
    bool: "a boolean",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
    type(None): "nothing",
}

_WANTED_BY_ERROR: dict[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
}


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without aliases, with duplicate keys refused and ``1e-4`` read as a number."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(
                None, None, "aliases (*name) are not accepted; write the value out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key_node, yaml.ScalarNode) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{key}' is given twice; keep one of them", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants "1.0e-4"; everybody writes "1e-4".
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_yaml(path: Path | str) -> dict[str, Any]:
    """Read one YAML mapping safely.

    Args:
        path: The file. An empty file is an empty mapping.

    Returns:
        The mapping, with plain Python values.

    Raises:
        ConfigurationError: The file cannot be read, is not YAML, repeats a key or holds no mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file; give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path}: not UTF-8 text (byte {error.start}); save the YAML file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror}); give a readable file") from None
    data = _parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{path}: got {describe_value(data)} at the top level, wanted a mapping of keys to values"
        )
    return data


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Lay ``key=value`` settings over a mapping.

    Args:
        data: The mapping; it is left as it was.
        overrides: ``key=value`` each. The key may be dotted (``training.iterations=5``), the value is
            read as YAML (``2``, ``1e-4``, ``true``, ``null``, ``[a, b]``). Later ones win.

    Returns:
        A new mapping.

    Raises:
        ConfigurationError: An override is not ``key=value`` or its path runs through a plain value.
    """
    result = _copy(data)
    for override in overrides:
        key, separator, text = override.partition("=")
        path = key.strip().split(".")
        if not separator or not all(path):
            raise ConfigurationError(
                f"override '{override}': wanted key=value with a dotted key, such as training.iterations=50"
            )
        value = _parse(text, f"override '{override}'")
        target = result
        for depth, part in enumerate(path[:-1], start=1):
            inner = target.get(part)
            if inner is None:
                inner = target[part] = {}
            if not isinstance(inner, dict):
                raise ConfigurationError(
                    f"override '{override}': '{'.'.join(path[:depth])}' is {describe_value(inner)}, "
                    "not a mapping, so nothing can be set inside it"
                )
            target = inner
        target[path[-1]] = value
    return result


def validate[ModelT: BaseModel](
    model_cls: type[ModelT],
    data: Mapping[str, Any],
    source: str,
    origin: Callable[[Sequence[str]], str | None] | None = None,
) -> ModelT:
    """Build a settings model from plain values, strictly typed.

    Args:
        model_cls: The pydantic model.
        data: Plain values as YAML gives them.
        source: Where the values come from; starts the message.
        origin: For a key path, the file that its value is from, where that is not plain from ``source``.

    Returns:
        The model.

    Raises:
        ConfigurationError: One line with every problem: key path, got, wanted.
    """
    try:
        # JSON mode is strict about types ("4" is no number) and still reads paths from strings.
        return model_cls.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        problems = _render_all(model_cls, error.errors(include_url=False), origin or (lambda _: None))
        hidden = len(problems) - _MAX_ERRORS_SHOWN
        shown = "; ".join(problems[:_MAX_ERRORS_SHOWN])
        more = f"; and {hidden} more" if hidden > 0 else ""
        raise ConfigurationError(f"{source}: {shown}{more}") from None


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Words for a name that does not exist: the closest match and all known ones."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"unknown {kind} '{name}'; {hint}known: {', '.join(names) or '(none)'}"


def describe_value(value: Any) -> str:
    """A value and its kind in words, short enough for a message."""
    if value is None:
        return "nothing (null)"
    kind = _TYPE_NAMES.get(type(value), type(value).__name__)
    if isinstance(value, list | dict):
        return kind
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind.removeprefix('a ')})"


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(f"{source}: not valid YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(f"{source}: not valid YAML: {reason}") from None


def _copy(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in data.items()}


def _render_all(
    model_cls: type[BaseModel], errors: list[ErrorDetails], origin: Callable[[Sequence[str]], str | None]
) -> list[str]:
    problems: list[str] = []
    mismatches: dict[str, list[str]] = {}  # a union field has one error for each alternative
    located = [
        _locate(model_cls, details["loc"], ends_in_key=details["type"] in ("extra_forbidden", "missing"))
        for details in errors
    ]
    paths = [".".join(location) for location, _ in located]
    for details, (location, owner) in zip(errors, located, strict=True):
        file = origin(location)
        origin_text = f"in {file}: " if file is not None else ""
        key = ".".join(location)
        cause = details.get("ctx", {}).get("error")
        if details["type"] == "extra_forbidden":
            where = f"{'.'.join(location[:-1])}: " if len(location) > 1 else ""
            unknown = unknown_name("key", location[-1], owner.model_fields if owner else ())
            problems.append(origin_text + where + unknown)
        elif details["type"] == "missing":
            problems.append(f"{key}: missing; add this key")
        elif isinstance(cause, ValueError):
            problems.append(origin_text + (str(cause) if str(cause).startswith(key) else f"{key}: {cause}"))
        else:
            wanted = _WANTED_BY_ERROR.get(details["type"], details["msg"].removeprefix("Input should be "))
            if any(key and path.startswith(f"{key}.") for path in paths):
                continue  # one alternative's complaint about a mapping, inside which another one found more
            where = f"{origin_text}{key or 'top level'}: got {describe_value(details['input'])}"
            mismatches.setdefault(where, []).append(wanted)
    return problems + [
        f"{where}, wanted {' or '.join(dict.fromkeys(wanted))}" for where, wanted in mismatches.items()
    ]


def _locate(
    model_cls: type[BaseModel], location: tuple[int | str, ...], *, ends_in_key: bool
) -> tuple[list[str], type[BaseModel] | None]:
    """Key path without pydantic's names for union alternatives, and the model that holds the last key."""
    path: list[str] = []
    owner: type[BaseModel] | None = None
    current: type[BaseModel] | None = model_cls
    for depth, part in enumerate(location):
        if isinstance(part, int):
            path.append(str(part))
        elif current is not None and part in current.model_fields:
            owner, current = current, _model_in(current.model_fields[part].annotation)
            path.append(part)
        elif depth == len(location) - 1 and current is not None and ends_in_key:
            owner = current  # an unknown key
            path.append(part)
    return path, owner


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, UnionType) or typing.get_origin(annotation) is not None:
        for inner in typing.get_args(annotation):
            if found := _model_in(inner):
                return found
    return None
