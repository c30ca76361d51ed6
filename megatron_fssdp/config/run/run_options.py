"""Options of the command line that change a run's settings, with the words that the user typed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_fssdp.config.loading import apply_overrides


@dataclass(frozen=True, eq=False)
class RunOption:
    """One option of the command line.

    Attributes:
        text: The option as typed, for example ``--iters 3``. Error messages that it causes start with it.
        change: Function from the keys and values of a run to the changed ones. It keeps its argument.
    """

    text: str
    change: Callable[[Mapping[str, Any]], dict[str, Any]]


def set_options(overrides: Iterable[str], flag: str = "--set") -> list[RunOption]:
    """Return one option for each ``key=value`` with a dotted key.

    Args:
        overrides: Texts ``key=value``.
        flag: The option that gives them.
    """
    return [
        RunOption(f"{flag} {text}", partial(apply_overrides, overrides=[text], asked_by=flag))
        for text in overrides
    ]


def changed(data: Mapping[str, Any], options: Iterable[RunOption]) -> dict[str, Any]:
    """Return the keys and values of a run after all options, in order."""
    result = dict(data)
    for option in options:
        result = option.change(result)
    return result


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of ``after`` that ``before`` lacks or has with another value.

    Layered over ``before`` (``composition.lay_over``), the result gives ``after``. A strategy of another name
    is returned as a whole, because its settings replace those of the strategy before.
    """
    result: dict[str, Any] = {}
    for key, value in after.items():
        low = before.get(key)
        if isinstance(value, Mapping) and isinstance(low, Mapping):
            renamed = key == "strategy" and value.get("name") != low.get("name")
            inner = dict(value) if renamed else difference(low, value)
            if inner:
                result[key] = inner
        elif key not in before or low != value:
            result[key] = value
    return result
