"""``megatron-fssdp configs``: lists and prints the YAML files that come with the package."""

from collections.abc import Sequence
from itertools import groupby

from megatron_fssdp.config.composition import compose
from megatron_fssdp.config.shipped_files import known_clusters, shipped_runs
from megatron_fssdp.config.yaml_text import format_yaml


def shipped_names() -> str:
    """Return the names of all shipped files, as text with one section per folder.

    Clusters, which the option ``--cluster`` accepts, are in the last section.
    """

    def folder_of(name: str) -> str:
        return name.rpartition("/")[0]

    lines = []
    for folder, names in groupby(sorted(shipped_runs(), key=folder_of), folder_of):
        lines += [f"{folder}/" if folder else "complete runs", *(f"  {name}" for name in names)]
    lines += ["clusters, for --cluster", *(f"  {name}" for name in known_clusters())]
    return "\n".join(lines) + "\n"


def composed_yaml(names: Sequence[str]) -> str:
    """Combine files into one YAML text without ``include``.

    Args:
        names: Paths of files, or names of shipped files. Later files win. The files can be parts of a run, so
            they are not validated.

    Raises:
        ConfigurationError: A file cannot be read or includes itself.
    """
    return format_yaml(compose(names).data, width=100)
