"""Combines a run's settings from several YAML files and options of the command line.

A file lists the files that it builds on under the key ``include``. The command line also accepts several
files, for example a model, a cluster and a strategy. Files are layered on each other: for each key, the value
of the topmost file wins. Options change the result.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import (
    Problem,
    apply_overrides,
    checked,
    closest,
    describe_value,
    load_yaml,
    one_line,
)
from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.run_config import SECTIONS, RunConfig
from megatron_fssdp.config.shipped_files import shipped_run, shipped_runs

INCLUDE_KEY = "include"
_ABSENT = object()
_MOST_FILES = 100  # files that include others twice would otherwise double with every level


@dataclass(frozen=True, eq=False)
class RunOption:
    """An option of the command line: the ``text`` as typed, and what it changes in a run's keys and values.

    Error messages that the option causes start with the text. ``change`` keeps its argument.
    """

    text: str
    change: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Layer:
    """The keys and values of one file, without ``include`` and without the files that it includes."""

    file: Path
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Composition:
    """Several settings files, layered on each other.

    Attributes:
        names: The files as the user named them.
        layers: These files and all files that they include, from bottom to top. Higher layers win.
    """

    names: tuple[str, ...]
    layers: tuple[Layer, ...]

    @property
    def data(self) -> dict[str, Any]:
        """The combined keys and values of all layers."""
        return reduce(lay_over, (layer.data for layer in self.layers), {})

    def with_file(self, file: Path) -> "Composition":
        """Return these layers with one more file on top, which includes nothing."""
        return replace(self, layers=(*self.layers, Layer(file, load_yaml(file))))

    def with_options(self, options: Sequence[RunOption] = ()) -> RunConfig:
        """Build validated run settings from these files and options, which change :attr:`data` in order.

        Raises:
            ConfigurationError: The settings are invalid. One line names every problem and its cause: the
                options without which the problem does not exist, or else the file that holds the wrong value.
        """
        data = changed(self.data, options)
        result = checked(RunConfig, data)
        if isinstance(result, RunConfig):
            return result
        source = self.names[0] if len(self.names) == 1 else ", ".join(Path(name).name for name in self.names)
        if "run" in data and "strategies" in data:
            raise ConfigurationError(
                f"{source}: got a sweep, wanted a run; `megatron-fssdp sweep {source}` trains all its runs"
            )
        if absent := [section for section in ("model", "training") if data.get(section) is None]:
            raise ConfigurationError(
                f"{source}: is a part of a run, without {' and '.join(absent)}; add what is missing, "
                "combine it with other parts, such as models/tiny-mixtral parallelism/cpu training/tiny, "
                "or start from gpt_moe_tiny"
            )
        causes: dict[str, str] = {}
        for option in options:
            left = checked(RunConfig, changed(self.data, [one for one in options if one is not option]))
            remaining = {one.text for one in left} if isinstance(left, list) else set()
            for problem in result:
                if problem.text not in remaining:
                    causes[problem.text] = f"{causes.get(problem.text, '')} {option.text}".strip()
        raise ConfigurationError(
            one_line(
                [(causes.get(one.text) or self._file_of(one, data) or source, one.text) for one in result]
            )
        )

    def _file_of(self, problem: Problem, data: Mapping[str, Any]) -> str:
        """Return the file that set the value of a problem's key; an empty text for none or several."""
        value = _value_at(data, problem.path)
        holders = [layer for layer in self.layers if _value_at(layer.data, problem.path) == value]
        return str(holders[-1].file) if holders and value is not _ABSENT else ""


def compose(files: Iterable[Path | str]) -> Composition:
    """Read settings files, of which later ones win, and all files that they include.

    A path in ``include`` is relative to the folder of the file that includes it. If no file exists at a path,
    the path is the name of a file that comes with the package (``shipped_files.shipped_run``).

    Raises:
        ConfigurationError: A file cannot be read, or includes itself directly or through others.
    """
    names = tuple(map(str, files))
    layers: list[Layer] = []
    for layer in chain.from_iterable(_layers(_asked(Path(name)), ()) for name in names):
        layers.append(layer)
        if len(layers) > _MOST_FILES:
            raise ConfigurationError(
                f"{layer.file}: more than {_MOST_FILES} files are combined; include fewer"
            )
    return Composition(names, tuple(layers))


def load_run(files: Iterable[Path | str], overrides: Iterable[str] = ()) -> RunConfig:
    """Read the validated settings of a run: files, of which later ones win, then ``key=value`` overrides.

    Raises:
        ConfigurationError: A file cannot be read (see :func:`compose`) or the settings are invalid.
    """
    return compose(files).with_options(set_options(overrides))


def set_options(overrides: Iterable[str], flag: str = "--set") -> list[RunOption]:
    """Return one option for each ``key=value`` with a dotted key. ``flag`` is the option that gives them."""
    return [
        RunOption(f"{flag} {text}", partial(apply_overrides, overrides=[text], asked_by=flag))
        for text in overrides
    ]


def words_option(words: Sequence[str]) -> RunOption:
    """Return the option ``-- WORDS``: arguments in Megatron's own form, which are settings like all others.

    Where Megatron's parser refuses a word, the option raises a ConfigurationError when it is applied.
    """
    return RunOption(f"-- {' '.join(words)}", partial(_with_words, words))


def changed(data: Mapping[str, Any], options: Iterable[RunOption]) -> dict[str, Any]:
    """Return the keys and values of a run after all options, in order."""
    result = dict(data)
    for option in options:
        result = option.change(result)
    return result


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of ``after`` that ``before`` lacks or has with another value.

    Layered over ``before`` (:func:`lay_over`), the result gives ``after``. A strategy of another name is
    returned as a whole, because its settings replace those of the strategy before.
    """
    result: dict[str, Any] = {}
    for key, value in after.items():
        low = before.get(key)
        if isinstance(value, Mapping) and isinstance(low, Mapping):
            renamed = key == "strategy" and value.get("name") != low.get("name")
            if inner := dict(value) if renamed else difference(low, value):
                result[key] = inner
        elif key not in before or low != value:
            result[key] = value
    return result


def lay_over(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Layer one mapping on another. Where both have a key, the value of ``high`` wins.

    Nested mappings are combined key by key. A ``null`` in place of a whole section changes nothing. If
    ``high`` names another strategy than ``low``, the strategy settings of ``low`` are dropped, because
    settings belong to their strategy.
    """
    section, below = high.get("strategy"), low.get("strategy")
    if isinstance(section, Mapping) and isinstance(below, Mapping):
        name_below = below.get("name", "none")
        if section.get("name", name_below) != name_below:
            low = {**low, "strategy": {}}
    return _merged(low, high)


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        below = low.get(key)
        if not isinstance(below, Mapping):
            result[key] = value
        elif isinstance(value, Mapping):
            result[key] = _merged(below, value)
        elif value is not None:
            result[key] = value
    return result


def _with_words(words: Sequence[str], data: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(data)
    try:
        given = megatron_options.parsed(words)
    except ConfigurationError as error:
        raise ConfigurationError(f"-- {' '.join(words)}: {error}") from None
    for name, value in given.items():
        homes = [section for section, model in SECTIONS.items() if name in model.model_fields]
        homes += [section for section in SECTIONS if name in (result.get(section) or {})]
        section = (*homes, megatron_options.section_of(name))[0]
        before = result.get(section) or {}
        if isinstance(before, Mapping):  # validation reports a wrong type
            result[section] = {**before, name: value}
    return result


def _asked(path: Path) -> Path:
    """Find the file for a path or for the name of a shipped file."""
    file = path if path.exists() else shipped_run(path) or path
    if file.suffix or file.exists():
        return file
    close = closest(path.as_posix(), list(shipped_runs()))
    hint = f"did you mean '{close}'? " if close else ""
    raise ConfigurationError(
        f"{path}: no such file, and the package has no config of that name; {hint}"
        "`megatron-fssdp configs` lists all names"
    )


def _layers(file: Path, above: tuple[Path, ...]) -> Iterator[Layer]:
    """Yield the layers of a file, from bottom to top. ``above`` is the chain of files that include it."""
    if any(os.path.realpath(other) == os.path.realpath(file) for other in above):
        circle = " → ".join(map(str, (*above, file)))
        raise ConfigurationError(
            f"{above[0]}: files include each other in a circle, {circle}; remove one include"
        )
    try:
        data = load_yaml(file)
    except ConfigurationError as error:
        raise ConfigurationError(f"{above[-1]}: include: {error}" if above else str(error)) from None
    for name in _included(data, file):
        beside = Path(os.path.normpath(file.parent / name))
        yield from _layers(beside if beside.exists() else shipped_run(name) or beside, (*above, file))
    yield Layer(file, {key: value for key, value in data.items() if key != INCLUDE_KEY})


def _included(data: Mapping[str, Any], file: Path) -> list[str]:
    names = data.get(INCLUDE_KEY, [])
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(names, list) or not isinstance(name, str) or not name or "\0" in name:
            raise ConfigurationError(
                f"{file}: include: got {describe_value(name)}, wanted a list of YAML files, such as "
                "[models/x.yaml]"
            )
    return names


def _value_at(data: Any, key_path: Sequence[str]) -> Any:
    for part in key_path:
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return _ABSENT
    return data
