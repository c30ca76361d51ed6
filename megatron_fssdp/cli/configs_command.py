"""``megatron-fssdp configs``: lists and prints what comes with the package."""

import os
import re
import sys
import textwrap
from itertools import groupby, takewhile
from pathlib import Path
from typing import Annotated

import typer

from megatron_fssdp.config.shipped_files import known_clusters, shipped_cluster, shipped_runs

_MOST_CHARACTERS = 110  # a description stays on one line of a wide terminal


def configs_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files or names to combine and print as one YAML. Later ones win. Or one cluster.",
            metavar="[CONFIG.yaml...]",
            autocompletion=lambda: {**shipped_runs(), **known_clusters()},
        ),
    ] = None,
) -> None:
    """List the runs, models and clusters that come with the package, or print one of them as YAML."""
    from megatron_fssdp.config.run.composition import compose
    from megatron_fssdp.config.yaml_text import format_yaml

    if names and len(names) == 1 and not Path(names[0]).is_file() and (cluster := shipped_cluster(names[0])):
        sys.stdout.write(cluster.read_text(encoding="utf-8"))
        return
    # The files can be parts of a run, so they are not validated.
    sys.stdout.write(format_yaml(compose(names).settings) if names else shipped_names())


def shipped_names() -> str:
    """Return one line for each shipped file, by folder: its name, its parameters, and what it is."""
    runs = shipped_runs()
    lines = []
    for folder, names in groupby(sorted(runs, key=os.path.dirname), os.path.dirname):
        lines.append(f"{folder}: parts of runs" if folder else "complete runs, to start from")
        lines += [_line(name, runs[name], _size(name)) for name in names]
    lines += ["clusters, for --cluster", *(_line(name, file, "") for name, file in known_clusters().items())]
    return "\n".join(lines) + "\n"


def _line(name: str, file: Path, size: str) -> str:
    return f"  {name:<38} {size:<25} {_description(file)}".rstrip()


def _description(file: Path) -> str:
    """Return the first sentence of the comment at the head of a YAML file, or an empty text."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.lstrip("# ") for line in comment)
    return textwrap.shorten(re.split(r"(?<=[.])\s+(?=[A-Z])", text)[0], _MOST_CHARACTERS, placeholder=" …")


def _size(name: str) -> str:
    """Return a model's parameters, and those that one token uses; an empty text for files without a model."""
    from megatron_fssdp.config.loading import validate
    from megatron_fssdp.config.run.composition import compose
    from megatron_fssdp.config.run.parameter_count import count_parameters
    from megatron_fssdp.config.run.sections import DataSettings, ModelArguments
    from megatron_fssdp.report.units import PARAMETERS, in_units

    settings = compose([name]).settings
    if "hidden_size" not in settings.get("model", {}):
        return ""  # the file has no model, or changes a few values of any model
    model = validate(ModelArguments, settings["model"], name)
    vocabulary = validate(DataSettings, settings.get("data", {}), name).vocab_size
    count = count_parameters(model, vocabulary)
    return f"{in_units(count.total, PARAMETERS)} ({in_units(count.activated, PARAMETERS)} a token)"
