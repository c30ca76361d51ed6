"""Cluster descriptions as YAML files: by path, or by name from ``configs/clusters``."""

from pathlib import Path

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import load_yaml, unknown_name, validate
from megatron_fssdp.config.shipped_files import known_clusters
from megatron_fssdp.config.yaml_text import format_yaml

_SUFFIXES = (".yaml", ".yml")


def load_cluster(path_or_name: Path | str) -> ClusterDescription:
    """Read a description.

    Args:
        path_or_name: A YAML file, or the name of one in ``configs/clusters`` of the working folder or of
            those that come with the package.

    Raises:
        ConfigurationError: There is no such file or name, or it describes no cluster.
    """
    path = Path(path_or_name)
    if not (path.is_file() or path.suffix in _SUFFIXES or len(path.parts) != 1):
        known = known_clusters()
        if path.name not in known:
            message = unknown_name("cluster", path.name, known)
            raise ConfigurationError(f"{message}; or give the path of a YAML file")
        path = known[path.name]
    return validate(ClusterDescription, load_yaml(path), str(path))


def cluster_yaml(description: ClusterDescription, comment: str = "") -> str:
    """A description as the YAML that :func:`load_cluster` reads.

    Args:
        description: The cluster.
        comment: Lines put above it, without their ``#``.
    """
    header = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    data = description.model_dump(mode="json", exclude_none=True)
    return header + format_yaml(data, width=100)
