"""Reads and writes cluster descriptions as YAML files, given by path or by a name in ``configs/clusters``."""

from pathlib import Path

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import load_yaml, unknown_name, validate
from megatron_fssdp.config.shipped_files import known_clusters
from megatron_fssdp.config.yaml_text import format_yaml

_SUFFIXES = (".yaml", ".yml")


def load_cluster(path_or_name: Path | str) -> ClusterDescription:
    """Read a cluster description.

    Args:
        path_or_name: Path of a YAML file, or a name. A name is looked up in ``configs/clusters`` of the
            working folder, then among the descriptions that come with the package.

    Raises:
        ConfigurationError: No such file or name exists, or the file is not a valid cluster description.
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
    """Return a description as YAML text that :func:`load_cluster` reads.

    Args:
        description: The cluster description.
        comment: Lines of a comment above the YAML, without the leading ``#``.
    """
    header = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    data = description.model_dump(mode="json", exclude_none=True)
    return header + format_yaml(data, width=100)
