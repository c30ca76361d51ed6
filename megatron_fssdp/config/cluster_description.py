"""A cluster in numbers: what planners weigh costs with and the simulator counts seconds with.

Written by ``megatron-fssdp profile`` from measurements, or by hand; the files of ``configs/clusters/``
say where each figure comes from.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

CollectiveName = Literal[
    "point_to_point", "row_exchange", "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast"
]
LinkClass = Literal["intra_node", "inter_node"]


class LinkDescription(BaseModel):
    """Seconds of a transfer: ``alpha_s + bytes / bandwidth_bytes_per_s`` (Parm, §V, Eq. 12)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alpha_s: float = Field(ge=0, description="Seconds to start, whatever the size.")
    bandwidth_bytes_per_s: float = Field(gt=0, description="Bytes a second in one direction.")


class FittedLink(LinkDescription):
    """A link as one collective was measured to use it."""

    r_squared: float | None = Field(default=None, le=1, description="Of the fit.")
    worst_relative_error: float | None = Field(default=None, ge=0, description="Of the fit.")


class ClusterDescription(BaseModel):
    """Equal nodes of equal devices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="What to call it in reports.")
    num_nodes: int = Field(ge=1, description="Machines.")
    devices_per_node: int = Field(ge=1, description="Devices (ranks) on each machine.")
    intra_node: LinkDescription = Field(description="One direction of one device's link inside its node.")
    inter_node: LinkDescription = Field(
        description="One direction of a node's NICs together, shared by the node's devices."
    )
    expert_flops_per_s: float = Field(gt=0, description="What a device reaches in expert GEMMs.")
    non_expert_flops_per_s: float = Field(
        gt=0, description="What a device reaches in attention and dense layers."
    )
    memory_bytes: int | None = Field(default=None, gt=0, description="Memory of a device.")
    collectives: dict[CollectiveName, dict[LinkClass, FittedLink]] = Field(
        default_factory=dict,
        description=(
            "Measured for single collectives; bandwidths per device, of the bytes that the busiest device "
            "sends over links of that class (inter_node: to other nodes, all devices of a node at once; for "
            "point_to_point one device alone; for all_to_all and row_exchange with the messages inside the "
            "nodes beside). row_exchange is this package's all-to-all. Used in place of "
            "the links where given."
        ),
    )
    sources: dict[str, str] = Field(
        default_factory=dict, description="Where a figure comes from, by its name above."
    )

    @property
    def num_devices(self) -> int:
        """Devices altogether."""
        return self.num_nodes * self.devices_per_node

    @model_validator(mode="after")
    def _check(self) -> Self:
        unknown = sorted(set(self.sources) - set(type(self).model_fields))
        if unknown:
            raise ValueError(
                f"sources names {unknown}, which the description does not have; wanted some of "
                f"{sorted(set(type(self).model_fields) - {'sources'})}"
            )
        return self
