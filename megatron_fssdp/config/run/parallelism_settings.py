"""Number of ranks and parallel sizes: the ``parallelism`` section of a run's YAML."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ParallelismSettings(BaseModel):
    """Number of ranks and parallel sizes. The data parallel size follows from the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nproc_per_node: int = Field(default=1, ge=1, description="Number of ranks on each machine.")
    num_nodes: int = Field(default=1, ge=1, description="Number of machines that torchrun spans.")
    declared_nodes: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Number of equal nodes that the placement strategies assume, in the order of the ranks, "
            "regardless of the real machines. Default: the nodes are detected."
        ),
    )
    tensor: int = Field(default=1, ge=1, description="Tensor parallel size.")
    pipeline: int = Field(default=1, ge=1, description="Pipeline parallel size.")
    virtual_pipeline: int | None = Field(
        default=None,
        ge=2,
        description="Number of model chunks on each pipeline rank, for Megatron's interleaved schedule.",
    )
    context: int = Field(default=1, ge=1, description="Context parallel size.")
    expert: int = Field(default=1, ge=1, description="Expert parallel size.")
    expert_tensor: int = Field(default=1, ge=1, description="Tensor parallel size of each expert.")
    sequence: bool = Field(
        default=False, description="Whether the tensor-parallel ranks also use sequence parallelism."
    )
    distributed_optimizer: bool = Field(
        default=False, description="Whether data-parallel ranks share the optimizer states among them."
    )
    overlap_grad_reduce: bool = Field(
        default=False, description="Whether gradients are reduced during the backward pass."
    )
    overlap_param_gather: bool = Field(
        default=False,
        description="Whether parameters are gathered during the forward pass. Needs distributed_optimizer.",
    )

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.nproc_per_node * self.num_nodes

    @property
    def data(self) -> int:
        """Data parallel size: ranks divided by the tensor, pipeline and context parallel sizes."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @model_validator(mode="after")
    def _check(self) -> Self:
        world, model = self.world_size, self.tensor * self.pipeline * self.context
        ranks = f"{world} ranks ({self.nproc_per_node} × {self.num_nodes} machines)"
        if world % model:
            raise ValueError(
                f"parallelism: tensor {self.tensor} × pipeline {self.pipeline} × context {self.context} "
                f"= {model} does not divide the {ranks}; change --nproc (nproc_per_node) or the sizes"
            )
        experts = self.expert * self.expert_tensor * self.pipeline
        if world % experts:
            raise ValueError(
                f"parallelism: expert {self.expert} × expert_tensor {self.expert_tensor} × pipeline "
                f"{self.pipeline} = {experts} does not divide the {ranks}; change --nproc (nproc_per_node) "
                "or the sizes"
            )
        if self.virtual_pipeline is not None and self.pipeline == 1:
            raise ValueError("parallelism.virtual_pipeline needs parallelism.pipeline of 2 or more; set it")
        if self.sequence and self.tensor == 1:
            raise ValueError("parallelism.sequence needs parallelism.tensor of 2 or more; set it")
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "parallelism.overlap_param_gather needs distributed_optimizer and overlap_grad_reduce, "
                "because only sharded parameters are gathered; set both to true"
            )
        if self.declared_nodes is not None and world % self.declared_nodes:
            raise ValueError(
                f"parallelism.declared_nodes {self.declared_nodes} does not divide the {ranks}; "
                "all declared nodes have the same number of ranks, so change one of the two"
            )
        return self
