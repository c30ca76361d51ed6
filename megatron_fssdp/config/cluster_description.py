"""Description of a cluster in numbers: links, throughput and memory.

``megatron-fssdp profile`` measures a cluster and writes its description. The files in ``configs/clusters/``
state the source of every figure.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import Settings, load_yaml, setting, unknown_name, validate
from megatron_fssdp.config.shipped_files import known_clusters, shipped_cluster
from megatron_fssdp.config.yaml_text import format_yaml

CollectiveName = Literal[
    "point_to_point", "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast"
]
LinkClass = Literal["intra_node", "inter_node"]


class LinkDescription(Settings):
    """Cost of a link: a transfer takes ``alpha_s + bytes / bandwidth_bytes_per_s`` (Parm, §V, Eq. 12)."""

    alpha_s: float = Field(ge=0, description="Seconds to start a transfer of any size.")
    bandwidth_bytes_per_s: float = Field(gt=0, description="Bytes per second in one direction.")


class FittedLink(LinkDescription):
    """Cost of a link under one collective, fitted to measurements."""

    r_squared: float | None = setting(None, "Coefficient of determination of the fit; 1 is perfect.", le=1)
    worst_relative_error: float | None = setting(
        None, "Largest relative error of the fit over all measured sizes.", ge=0
    )


class ClusterDescription(Settings):
    """Numbers of a cluster that has equal nodes with equal devices."""

    name: str = Field(description="Name of the cluster in reports.")
    num_nodes: int = Field(ge=1, description="Number of nodes (machines).")
    devices_per_node: int = Field(ge=1, description="Number of devices (ranks) on each node.")
    intra_node: LinkDescription = Field(description="One direction of one device's link inside its node.")
    inter_node: LinkDescription = Field(
        description="One direction of all NICs of a node together. The node's devices share them."
    )
    inter_device: LinkDescription = Field(
        description="One direction of what one device reaches between nodes while no other device of its "
        "node sends: with a NIC for each device, that of its NIC."
    )
    expert_flops_per_s: float = Field(
        gt=0, description="Floating-point operations per second that a device reaches in expert GEMMs."
    )
    non_expert_flops_per_s: float = Field(
        gt=0, description="The same in attention and dense layers, in floating-point operations per second."
    )
    memory_bytes: int | None = setting(None, "Memory of one device, in bytes.", gt=0)
    collectives: dict[CollectiveName, dict[LinkClass, FittedLink]] = setting(
        {},
        "Measured costs of single collectives, which replace intra_node and inter_node. A bandwidth is per "
        "device and counts the bytes that the busiest device sends over links of the class. inter_node "
        "counts bytes to other nodes while all devices of a node send at once. all_to_all is one of those of "
        "a MoE layer with even loads, with the sorting of rows, and with messages inside the nodes.",
    )
    sources: dict[str, str] = setting({}, "Source of each figure, by the figure's key above.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_older_profile(cls, values: Any) -> Any:
        if isinstance(values, dict) and "inter_node" in values and "inter_device" not in values:
            raise ValueError(
                "inter_device is missing, as in files of an older profile, which do not say what one device "
                "reaches between nodes; run megatron-fssdp profile again, or add it: with one NIC in a node, "
                "the values of inter_node"
            )
        return values

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole cluster."""
        return self.num_nodes * self.devices_per_node


def load_cluster(path_or_name: Path | str) -> ClusterDescription:
    """Read a description from a YAML file, or by its name, or raise a ConfigurationError."""
    path = Path(path_or_name)
    if not path.is_file():
        shipped = shipped_cluster(path)
        if not (shipped or path.suffix in (".yaml", ".yml") or len(path.parts) != 1):
            message = unknown_name("cluster", path.name, known_clusters())
            raise ConfigurationError(f"{message}; or give the path of a YAML file")
        path = shipped or path
    return validate(ClusterDescription, load_yaml(path), str(path))


def cluster_yaml(description: ClusterDescription, comment: str = "") -> str:
    """Return a description as YAML text that :func:`load_cluster` reads, below the lines of a comment."""
    header = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return header + format_yaml(description.model_dump(mode="json", exclude_none=True))
