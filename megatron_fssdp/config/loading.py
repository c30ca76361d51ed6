"""Builds validated settings models from YAML files and ``key=value`` overrides.

Every mistake of a user gives a :class:`ConfigurationError` with a one-line message.
"""

import difflib
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.yaml_text import parse_yaml

_MAX_ERRORS_SHOWN = 4


class Problem(NamedTuple):
    """What is wrong in a mapping: the path of the key, and one line that names it."""

    path: tuple[str, ...]
    text: str


def load_yaml(path: Path | str) -> dict[str, Any]:
    """Read a YAML file that holds one mapping of keys to values. An empty file is an empty mapping.

    Raises:
        ConfigurationError: The file cannot be read, is not valid YAML, or does not hold a mapping.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file; give the path of a YAML file") from None
    except IsADirectoryError:
        raise ConfigurationError(f"{path}: is a folder; give the path of a YAML file") from None
    except (OSError, ValueError) as error:  # a ValueError is about bytes that are no UTF-8, or in the name
        raise ConfigurationError(f"{path}: cannot be read ({error}); give a YAML file in UTF-8") from None
    data = parse_yaml(text, str(path))
    if data is not None and not isinstance(data, dict):
        raise ConfigurationError(
            f"{path}: got {describe_value(data)} at the top level, wanted a mapping of keys to values"
        )
    return data or {}


def apply_overrides(
    data: Mapping[str, Any], overrides: Iterable[str], asked_by: str = "override"
) -> dict[str, Any]:
    """Return a mapping with ``key=value`` overrides merged into it, of which later ones win.

    Raises:
        ConfigurationError: A text is not ``key=value`` (see :func:`parse_override`).
    """
    return reduce(merged, (parse_override(text, asked_by) for text in overrides), dict(data))


def parse_override(text: str, asked_by: str) -> dict[str, Any]:
    """Return ``key=value`` as nested mappings; messages start with the option ``asked_by``.

    The key can be dotted (``training.train_iters=5``). The value is read as YAML (``1e-4``, ``[a, b]``).

    Raises:
        ConfigurationError: The text is not ``key=value``.
    """
    key, separator, value = text.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise ConfigurationError(
            f"{asked_by} '{text}': wanted key=value, such as slots=2 or training.train_iters=50"
        )
    result = parse_yaml(value, f"{asked_by} '{text}'")
    for part in reversed(path):
        result = {part: result}
    return dict(result)


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Combine nested mappings key by key. Where both have a key, the value of ``high`` wins.

    A ``null`` in place of a mapping changes nothing.
    """
    result = dict(low)
    for key, value in high.items():
        below = low.get(key)
        if not isinstance(below, Mapping):
            result[key] = value
        elif isinstance(value, Mapping):
            result[key] = merged(below, value)
        elif value is not None:
            result[key] = value
    return result


def validate[ModelT: BaseModel](model_cls: type[ModelT], data: Mapping[str, Any], source: str) -> ModelT:
    """Build a settings model from plain values of a file or option ``source``, without converting types.

    Raises:
        ConfigurationError: The values are invalid. One line has the source, and for each problem the path of
            the key, the value that was got, and what is wanted.
    """
    result = checked(model_cls, data)
    if isinstance(result, list):
        raise ConfigurationError(one_line([(source, problem.text) for problem in result]))
    return result


def checked[ModelT: BaseModel](model_cls: type[ModelT], data: Mapping[str, Any]) -> ModelT | list[Problem]:
    """Build a settings model as :func:`validate` does, or return its problems.

    A model can have ``key_problems``, which yields path and problem of keys that it does not declare.
    """
    find = getattr(model_cls, "key_problems", lambda _: ())
    problems = [_problem(path, text) for path, text in find(data)]
    try:
        # JSON mode is strict about types ("4" is not a number), but still reads paths from strings.
        result = model_cls.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        return problems + _problems(model_cls, data, error.errors(include_url=False))
    return problems or result


def one_line(problems: Sequence[tuple[str, str]]) -> str:
    """Join pairs of source and problem into one line. Of many problems, the last ones are only counted."""
    shown = [
        f"{source}: {'; '.join(text for _, text in group)}"
        for source, group in groupby(problems[:_MAX_ERRORS_SHOWN], key=lambda one: one[0])
    ]
    hidden = len(problems) - _MAX_ERRORS_SHOWN
    return "; ".join([*shown, *([f"and {hidden} more"] if hidden > 0 else [])])


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
    """Return a value as an error message shows it: texts in quotes, and short."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _problem(path: Sequence[str], text: str) -> Problem:
    """Return a problem whose text names the key. A text about an unknown key names it itself."""
    key = ".".join(path[:-1] if text.startswith("unknown key") else path)
    return Problem(tuple(path), text if not key or text.startswith(key) else f"{key}: {text}")


def _problems(
    model_cls: type[BaseModel], data: Mapping[str, Any], errors: Sequence[ErrorDetails]
) -> list[Problem]:
    """Turn pydantic's errors into one problem for each key; a union has an error for each alternative."""
    paths = [_key_path(details, data) for details in errors]
    found: dict[tuple[str, ...], str] = {}
    for path, details in zip(paths, errors, strict=True):
        cause = details.get("ctx", {}).get("error")
        if details["type"] == "extra_forbidden":
            found[path] = unknown_name("key", path[-1], _model_at(model_cls, path[:-1]).model_fields)
        elif details["type"] == "missing":
            found[path] = "missing; add this key"
        elif isinstance(cause, ValueError):
            found[path] = str(cause)
        elif not any(other[: len(path)] == path and other != path for other in paths):  # inside the value
            before = (
                f"{found[path]} or" if path in found else f"got {describe_value(details['input'])}, wanted"
            )
            found[path] = f"{before} {_wanted(details['msg'])}"
    return [_problem(path, text) for path, text in found.items()]


def _wanted(message: str) -> str:
    rest = message.partition(" should ")[2] or message
    return rest.removeprefix("be ") if rest.startswith("be ") else f"it to {rest}"


def _key_path(details: ErrorDetails, data: Any) -> tuple[str, ...]:
    """Return the user's keys in an error's location, which also has pydantic's names of alternatives."""
    path: list[str] = []
    for part in details["loc"]:
        is_item = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if is_item or (isinstance(data, Mapping) and part in data):
            data = data[part]
            path.append(str(part))
    if details["type"] == "missing":
        path.append(str(details["loc"][-1]))
    return tuple(path)


def _model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    """Return the model that holds the keys at a path."""
    for part in path:
        field = model.model_fields.get(part)  # there is none for an item of a list, or a key of a mapping
        model = (field and _model_in(field.annotation)) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(one) for one in typing.get_args(annotation))
    return next((found for found in inner if found), None)
