"""``megatron-fssdp configs``: what comes with the package, for those who have no checkout to look into."""

from collections.abc import Sequence
from itertools import groupby

from megatron_fssdp.config.composition import compose
from megatron_fssdp.config.shipped_files import known_clusters, shipped_runs
from megatron_fssdp.config.yaml_text import format_yaml


def shipped_names() -> str:
    """Names for ``train``, ``simulate --model`` and others, folder by folder, and those for ``--cluster``."""
    lines = []
    for folder, names in groupby(shipped_runs(), lambda name: name.rpartition("/")[0]):
        lines += [f"{folder}/" if folder else "whole runs", *(f"  {name}" for name in names)]
    lines += ["for --cluster", *(f"  {name}" for name in known_clusters())]
    return "\n".join(lines) + "\n"


def composed_yaml(names: Sequence[str]) -> str:
    """Files laid over one another, as one YAML without ``include``.

    Args:
        names: Files, or names of shipped ones. They may be parts of a run, so nothing is validated.

    Raises:
        ConfigurationError: One of them cannot be read, or includes itself.
    """
    return format_yaml(compose(names).data, width=100)
