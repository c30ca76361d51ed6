"""Builds validated settings models from YAML files and ``key=value`` overrides.

Every mistake of a user gives a :class:`ConfigurationError` with a one-line message.
"""

import difflib
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.yaml_text import parse_yaml

_MAX_ERRORS_SHOWN = 4

Problems = dict[tuple[str, ...], str]
"""What is wrong in a mapping, by the path of the key."""


class Settings(BaseModel):
    """Immutable settings that refuse keys which they do not declare."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def key_problems(cls, settings: Mapping[str, Any]) -> Problems:
        """Return what is wrong with keys that pydantic cannot judge."""
        return {}


ModelT = TypeVar("ModelT", bound=Settings)


def setting(
    default: Any, description: str, no_effect_if: Mapping[str, tuple[Any, ...]] | None = None, **limits: Any
) -> Any:
    """A setting with a default, a text for users, and pydantic's limits such as ``ge=1``.

    ``no_effect_if`` has the values of other keys under which the setting does nothing. It is then refused.
    """
    extra: Any = {"no_effect_if": no_effect_if} if no_effect_if else None
    return Field(default, description=description, json_schema_extra=extra, **limits)


def load_yaml(path: Path | str) -> dict[str, Any]:
    """Read a YAML file that is empty or holds one mapping of keys to values."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:  # a ValueError is about bytes that are no UTF-8, or in the name
        reason = str(getattr(error, "strerror", error)).lower()
        raise ConfigurationError(f"{path}: {reason}; give the path of a YAML file in UTF-8") from None
    content = parse_yaml(text, str(path))
    if content is not None and not isinstance(content, dict):
        raise ConfigurationError(
            f"{path}: got {describe_value(content)} at the top level, wanted a mapping of keys to values"
        )
    return content or {}


def apply_overrides(
    values: Mapping[str, Any], overrides: Iterable[str], asked_by: str = "override"
) -> dict[str, Any]:
    """Return a mapping with ``key=value`` overrides merged into it as :func:`parse_override` reads them."""
    return reduce(merged, (parse_override(text, asked_by) for text in overrides), dict(values))


def parse_override(text: str, asked_by: str) -> dict[str, Any]:
    """Return ``dotted.key=value`` as nested mappings; the value is read as YAML (``1e-4``, ``[a, b]``)."""
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
    """Combine nested mappings; values of ``high`` win, but ``null`` in place of a mapping changes nothing."""
    result = dict(low)
    for key, value in high.items():
        below = low.get(key)
        if not isinstance(below, Mapping):
            result[key] = value
        elif value is not None:
            result[key] = merged(below, value) if isinstance(value, Mapping) else value
    return result


def validate(  # noqa: UP047  # doctor is read by older Pythons
    model_cls: type[ModelT], values: Mapping[str, Any], source: str | Callable[[tuple[str, ...], str], str]
) -> ModelT:
    """Build a settings model from plain values, without converting types.

    ``source`` is the file or option that the values come from, or finds it for a key's path and its problem.

    Raises:
        ConfigurationError: The values are invalid. One line has all problems; of many, the last are counted.
    """
    problems = model_cls.key_problems(values)
    try:
        # JSON mode is strict about types ("4" is not a number), but still reads paths from strings.
        result = model_cls.model_validate_json(json.dumps(values, default=str), strict=True)
        if not problems:
            return result
    except ValidationError as error:
        problems = _problems(model_cls, values, error.errors(include_url=False)) | problems
    texts = []
    for path, text in problems.items():
        # A text about an unknown key, or about several keys, names them itself.
        key = ".".join(path[:-1] if text.startswith("unknown key") else path)
        text = text if not key or text.startswith(key) else f"{key}: {text}"
        texts.append((source if isinstance(source, str) else source(path, text), text))
    shown = [
        f"{name}: {'; '.join(text for _, text in group)}"
        for name, group in groupby(texts[:_MAX_ERRORS_SHOWN], key=lambda pair: pair[0])
    ]
    if len(texts) > _MAX_ERRORS_SHOWN:
        shown.append(f"and {len(texts) - _MAX_ERRORS_SHOWN} more")
    raise ConfigurationError("; ".join(shown))


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name of a kind (``"key"``): the closest match and all known names."""
    names = list(known)
    near = closest(name, names)
    hint = f"did you mean '{near}'? " if near else ""
    return f"unknown {kind} '{name}'; {hint}known: {', '.join(names) or '(none)'}"


def closest(name: str, known: Sequence[str]) -> str:
    """Return the known name that is most similar or begins with the name; an empty text without one."""
    begins = [candidate for candidate in known if candidate.startswith(f"{name}_")]
    return next(iter((*difflib.get_close_matches(name, known, n=1), *begins)), "")


def describe_value(value: Any) -> str:
    """Return a value as an error message shows it: texts in quotes, and short."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _problems(
    model_cls: type[BaseModel], values: Mapping[str, Any], errors: Sequence[ErrorDetails]
) -> Problems:
    """Turn pydantic's errors into one problem for each key; a union has an error for each alternative."""
    paths = [_key_path(details, values) for details in errors]
    texts: Problems = {}
    for path, details in zip(paths, errors, strict=True):
        cause = details.get("ctx", {}).get("error")
        if details["type"] == "extra_forbidden":
            texts[path] = unknown_name("key", path[-1], _model_at(model_cls, path[:-1]).model_fields)
        elif details["type"] == "missing":
            texts[path] = "missing; add this key"
        elif isinstance(cause, ValueError):
            texts[path] = str(cause)
        elif not any(inner[: len(path)] == path and inner != path for inner in paths):  # inside the value
            before = (
                f"{texts[path]} or" if path in texts else f"got {describe_value(details['input'])}, wanted"
            )
            texts[path] = f"{before} {_wanted(details['msg'])}"
    return texts


def _wanted(message: str) -> str:
    rest = message.partition(" should ")[2] or message
    return rest.removeprefix("be ") if rest.startswith("be ") else f"it to {rest}"


def _key_path(details: ErrorDetails, value: Any) -> tuple[str, ...]:
    """Return the user's keys in an error's location, which also has pydantic's names of alternatives."""
    path: list[str] = []
    for part in details["loc"]:
        with suppress(LookupError, TypeError):
            value = value[part]
            path.append(str(part))
    if details["type"] == "missing":
        path.append(str(details["loc"][-1]))
    return tuple(path)


def _model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    """Return the model that holds the keys at a path."""
    for part in path:
        # Items of a list and keys of a mapping have no field.
        kinds = [model.model_fields[part].annotation] if part in model.model_fields else []
        for kind in kinds:  # the list grows by what unions and collections consist of
            kinds += typing.get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind
                break
    return model
