"""Reads and writes cluster descriptions as YAML files, given by path or by a name in ``configs/clusters``."""

from pathlib import Path

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import load_yaml, unknown_name, validate
from megatron_fssdp.config.shipped_files import known_clusters
from megatron_fssdp.config.yaml_text import format_yaml


def load_cluster(path_or_name: Path | str) -> ClusterDescription:
    """Read a cluster description from a YAML file, or by a name in ``configs/clusters``.

    A name is looked up in the working folder, then among the descriptions that come with the package.

    Raises:
        ConfigurationError: No such file or name exists, or the file is not a valid cluster description.
    """
    path = Path(path_or_name)
    if not (path.is_file() or path.suffix in (".yaml", ".yml") or len(path.parts) != 1):
        known = known_clusters()
        if path.name not in known:
            message = unknown_name("cluster", path.name, known)
            raise ConfigurationError(f"{message}; or give the path of a YAML file")
        path = known[path.name]
    return validate(ClusterDescription, load_yaml(path), str(path))


def cluster_yaml(description: ClusterDescription, comment: str = "") -> str:
    """Return a description as YAML text that :func:`load_cluster` reads, below the lines of a comment."""
    header = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    data = description.model_dump(mode="json", exclude_none=True)
    return header + format_yaml(data, width=100)
