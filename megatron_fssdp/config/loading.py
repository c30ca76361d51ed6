"""Builds validated settings models from YAML files and ``key=value`` overrides.

Every mistake of a user gives a :class:`ConfigurationError` with a one-line message.
"""

import difflib
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.yaml_text import parse_yaml

_MAX_ERRORS_SHOWN = 4
_MOST_BYTES = 1 << 20  # settings have a few kB, and PyYAML needs seconds to read one MB

_TYPE_NAMES: dict[type, str] = {
    bool: "a boolean",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
    type(None): "nothing",
}

_WANTED: dict[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of keys to values",
    "model": "a mapping of keys to values",
}
"""What is wanted, by the beginning of the name of pydantic's error."""


def load_yaml(path: Path | str) -> dict[str, Any]:
    """Read a YAML file that holds one mapping of keys to values.

    An empty file counts as an empty mapping.

    Raises:
        ConfigurationError: The file cannot be read, is larger than a settings file can be, is not valid YAML,
            has a key twice, or does not hold a mapping.
    """
    path = Path(path)
    data = parse_yaml(_settings_text(path), str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{path}: got {describe_value(data)} at the top level, wanted a mapping of keys to values"
        )
    return data


def apply_overrides(
    data: Mapping[str, Any], overrides: Iterable[str], asked_by: str = "override"
) -> dict[str, Any]:
    """Return a mapping with ``key=value`` overrides applied; the argument is left unchanged.

    Args:
        data: The mapping.
        overrides: Texts ``key=value``. The key can be dotted (``training.train_iters=5``). The value is read
            as YAML (``2``, ``1e-4``, ``true``, ``null``, ``[a, b]``). Later overrides win.
        asked_by: The option that gives the overrides. Error messages start with it.

    Raises:
        ConfigurationError: An override is not ``key=value``, or its dotted key goes through a value that is
            not a mapping.
    """
    result = _copy(data)
    for override in overrides:
        key, separator, text = override.partition("=")
        path = key.strip().split(".")
        if not separator or not all(path):
            raise ConfigurationError(
                f"{asked_by} '{override}': wanted key=value, such as slots=2 or training.train_iters=50"
            )
        value = parse_yaml(text, f"{asked_by} '{override}'")
        target = result
        for depth, part in enumerate(path[:-1], start=1):
            inner = target.get(part)
            if inner is None:
                inner = target[part] = {}
            if not isinstance(inner, dict):
                raise ConfigurationError(
                    f"{asked_by} '{override}': '{'.'.join(path[:depth])}' is {describe_value(inner)}, "
                    "not a mapping, so nothing can be set inside it"
                )
            target = inner
        target[path[-1]] = value
    return result


def validate[ModelT: BaseModel](model_cls: type[ModelT], data: Mapping[str, Any], source: str) -> ModelT:
    """Build a settings model from plain values, without converting types.

    Args:
        model_cls: Pydantic model class of the settings.
        data: Plain values, as YAML gives them.
        source: Name of the file or option that the values come from. Error messages start with it.

    Raises:
        ConfigurationError: The values are invalid. The message is one line. For each problem it gives the key
            path, the value that was got, and what is wanted.
    """
    result = checked(model_cls, data)
    if isinstance(result, list):
        raise ConfigurationError(one_line([(source, problem) for problem in result]))
    return result


def checked[ModelT: BaseModel](
    model_cls: type[ModelT],
    data: Mapping[str, Any],
    origin: Callable[[Sequence[str]], str | None] | None = None,
) -> ModelT | list[str]:
    """Build a settings model as :func:`validate` does, or return its problems as texts of one line each.

    A model can have ``key_problems``, which yields path and problem of keys that it does not declare.
    ``origin`` takes a key path and returns the file that set its value, if the problem has to name it.
    """
    where = origin or (lambda _: None)
    find = getattr(model_cls, "key_problems", lambda _: ())
    problems = [_render(path, text, where(path)) for path, text in find(data)]
    try:
        # JSON mode is strict about types ("4" is not a number), but still reads paths from strings.
        result = model_cls.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        return problems + _render_all(model_cls, error.errors(include_url=False), where)
    return problems or result


def one_line(problems: Sequence[tuple[str, str]]) -> str:
    """Join pairs of source and problem into one line. Of many problems, the last ones are only counted."""
    shown, last = "", ""
    for source, problem in problems[:_MAX_ERRORS_SHOWN]:
        shown += "; " * bool(shown) + (f"{source}: " if source != last else "") + problem
        last = source
    hidden = len(problems) - _MAX_ERRORS_SHOWN
    return f"{shown}; and {hidden} more" if hidden > 0 else shown


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name of a kind (``"key"``): the closest match and all known names."""
    names = list(known)
    near = closest(name, names)
    hint = f"did you mean '{near}'? " if near else ""
    return f"unknown {kind} '{name}'; {hint}known: {', '.join(names) or '(none)'}"


def closest(name: str, known: Sequence[str]) -> str:
    """Return the known name that is most similar or begins with the name; an empty text without one."""
    begins = [other for other in known if other.startswith(f"{name}_")]
    return next(iter((*difflib.get_close_matches(name, known, n=1), *begins)), "")


def describe_value(value: Any) -> str:
    """Describe a value and its type in words, short enough for an error message."""
    if value is None:
        return "nothing (null)"
    kind = _TYPE_NAMES.get(type(value), type(value).__name__)
    if isinstance(value, list | dict):
        return kind
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind.removeprefix('a ')})"


def _settings_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file; give the path of a YAML file") from None
    except IsADirectoryError:
        inside = path / "config.yaml"
        instead = str(inside) if inside.exists() else "the path of a YAML file"
        raise ConfigurationError(f"{path}: is a folder, wanted a YAML file; give {instead}") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror}); give a readable file") from None
    except ValueError as error:  # the file name contains a null byte
        raise ConfigurationError(f"{path}: cannot be read ({error}); give a readable file") from None
    if len(content) > _MOST_BYTES:
        raise ConfigurationError(
            f"{path}: larger than {_MOST_BYTES >> 20} MiB, so it is not a settings file; give a run's YAML"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path}: not UTF-8 text (byte {error.start}); save the YAML file as UTF-8"
        ) from None


def _copy(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in data.items()}


def _render(path: Sequence[str], text: str, file: str | None) -> str:
    """Return a problem with its file and key. A text about an unknown key names the key itself."""
    key = ".".join(path[:-1] if text.startswith("unknown key") else path)
    is_named = not key or text.startswith(key)
    return (f"in {file}: " if file is not None else "") + (text if is_named else f"{key}: {text}")


def _render_all(
    model_cls: type[BaseModel], errors: list[ErrorDetails], origin: Callable[[Sequence[str]], str | None]
) -> list[str]:
    problems: list[str] = []
    mismatches: dict[str, list[str]] = {}  # a union field gives one error for each alternative
    located = [
        _locate(model_cls, details["loc"], ends_in_key=details["type"] in ("extra_forbidden", "missing"))
        for details in errors
    ]
    paths = [".".join(location) for location, _ in located]
    causes = [details.get("ctx", {}).get("error") for details in errors]
    refused = {path for cause, path in zip(causes, paths, strict=True) if isinstance(cause, ValueError)}
    for details, (location, owner), cause, key in zip(errors, located, causes, paths, strict=True):
        file = origin(location)
        if details["type"] == "extra_forbidden":
            known = owner.model_fields if owner else ()
            problems.append(_render(location, unknown_name("key", location[-1], known), file))
        elif details["type"] == "missing":
            problems.append(f"{key}: missing; add this key")
        elif isinstance(cause, ValueError):
            problems.append(_render(location, str(cause), file))
        elif key not in refused and not any(key and path.startswith(f"{key}.") for path in paths):
            # Otherwise another alternative of the union found a more exact problem, or refused the value.
            kind, _, error = details["type"].partition("_")
            is_type = error in ("type", "parsing", "from_float", "attributes_type")
            wanted = _WANTED.get(kind, "") if is_type else details["msg"].removeprefix("Input should be ")
            got = _render([key or "top level"], f"got {describe_value(details['input'])}", file)
            mismatches.setdefault(got, []).append(wanted)
    return problems + [
        f"{got}, wanted {' or '.join(dict.fromkeys(wanted))}" for got, wanted in mismatches.items()
    ]


def _locate(
    model_cls: type[BaseModel], location: tuple[int | str, ...], *, ends_in_key: bool
) -> tuple[list[str], type[BaseModel] | None]:
    """Return the key path of an error and the model that holds the last key.

    Pydantic's location also contains its own names of union alternatives. They are left out.
    """
    path: list[str] = []
    owner: type[BaseModel] | None = None
    current: type[BaseModel] | None = model_cls
    in_mapping = False
    for depth, part in enumerate(location):
        if isinstance(part, int):
            path.append(str(part))
        elif in_mapping:  # a key that the user chose
            in_mapping = False
            path.append(part)
        elif current is not None and part in current.model_fields:
            annotation = current.model_fields[part].annotation
            owner, current = current, _model_in(annotation)
            in_mapping = typing.get_origin(annotation) is dict
            path.append(part)
        elif depth == len(location) - 1 and current is not None and ends_in_key:
            owner = current  # an unknown key
            path.append(part)
    return path, owner


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(one) for one in typing.get_args(annotation))
    return next((found for found in inner if found), None)
