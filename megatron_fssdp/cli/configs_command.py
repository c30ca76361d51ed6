"""``megatron-fssdp configs``: lists and prints the YAML files that come with the package."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_fssdp.config.loading import validate
from megatron_fssdp.config.run.composition import compose
from megatron_fssdp.config.run.sections import DataSettings, ModelArguments
from megatron_fssdp.config.shipped_files import known_clusters, shipped_runs
from megatron_fssdp.config.yaml_text import format_yaml
from megatron_fssdp.simulation.parameter_count import count_parameters

_MOST_CHARACTERS = 110  # a description stays on one line of a wide terminal
_SENTENCE = re.compile(r".*?[.](?=\s+[A-Z]|$)")
_TITLES = {
    "": "complete runs, to start from",
    "experiments": "experiments: complete runs of papers and of known models",
    "models": "models: parts with a model",
    "parallelism": "parallelism: parts with ranks and machines",
    "strategies": "strategies: parts with a strategy",
    "training": "training: parts with a training plan",
}


def shipped_names() -> str:
    """Return text with one line for each shipped file: its name, its parameters, and what it is.

    Files are in sections by folder. Clusters, which the option ``--cluster`` accepts, are in the last one.
    """

    def folder_of(name: str) -> str:
        return name.rpartition("/")[0]

    runs = shipped_runs()
    lines = []
    for folder, names in groupby(sorted(runs, key=folder_of), folder_of):
        lines += [_TITLES.get(folder, folder), *(_line(name, runs[name], _size(name)) for name in names)]
    lines += ["clusters, for --cluster", *(_line(name, file, "") for name, file in known_clusters().items())]
    return "\n".join(lines) + "\n"


def _line(name: str, file: Path, size: str) -> str:
    return f"  {name:<38} {size:<25} {description_of(file)}".rstrip()


def description_of(file: Path) -> str:
    """Return the first sentence of the comment at the head of a YAML file, or an empty text."""
    comment = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            comment.append(line.lstrip("# "))
    text = " ".join(comment)
    sentence = _SENTENCE.match(text)
    return textwrap.shorten(sentence[0] if sentence else text, _MOST_CHARACTERS, placeholder=" …")


def _size(name: str) -> str:
    """Return a model's parameters, and those that one token uses; an empty text for files without a model."""
    data: Mapping[str, Any] = compose([name]).data
    if "hidden_size" not in data.get("model", {}):
        return ""  # the file has no model, or changes a few values of any model
    model = validate(ModelArguments, data["model"], name)
    vocabulary = validate(DataSettings, data.get("data", {}), name).vocab_size
    count = count_parameters(model, vocabulary)
    return f"{_rounded(count.total)} ({_rounded(count.activated)} a token)"


def _rounded(parameters: int) -> str:
    """Return a number of parameters in millions or billions, with three digits."""
    for unit, letter in ((1e9, "B"), (1e6, "M")):
        if parameters >= 0.9995 * unit:
            value = parameters / unit
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {letter}"
    return f"{parameters / 1e3:.0f} k"


def composed_yaml(names: Sequence[str]) -> str:
    """Combine files into one YAML text without ``include``.

    Args:
        names: Paths of files, or names of shipped files. Later files win. The files can be parts of a run, so
            they are not validated.

    Raises:
        ConfigurationError: A file cannot be read or includes itself.
    """
    return format_yaml(compose(names).data, width=100)
