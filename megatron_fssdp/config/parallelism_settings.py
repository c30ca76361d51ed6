"""How the model is cut over ranks: the ``parallelism`` section of a run's YAML."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ParallelismSettings(BaseModel):
    """Parallel sizes. Data parallelism is what is left of the ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nproc_per_node: int = Field(default=1, ge=1, description="Ranks on each machine.")
    num_nodes: int = Field(default=1, ge=1, description="Machines that torchrun spans.")
    declared_nodes: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Equal nodes that the placement strategies take the ranks to form, in rank order, whatever the "
            "machines are. Default: detected."
        ),
    )
    tensor: int = Field(default=1, ge=1, description="Tensor parallel size.")
    pipeline: int = Field(default=1, ge=1, description="Pipeline parallel size.")
    virtual_pipeline: int | None = Field(
        default=None, ge=2, description="Model chunks on each pipeline rank (interleaved schedule)."
    )
    context: int = Field(default=1, ge=1, description="Context parallel size.")
    expert: int = Field(default=1, ge=1, description="Expert parallel size.")
    expert_tensor: int = Field(default=1, ge=1, description="Tensor parallel size inside an expert.")
    sequence: bool = Field(default=False, description="Sequence parallelism over the tensor ranks.")
    distributed_optimizer: bool = Field(
        default=False, description="Shard optimizer state over the data parallel ranks."
    )
    overlap_grad_reduce: bool = Field(default=False, description="Reduce gradients during the backward.")
    overlap_param_gather: bool = Field(
        default=False, description="Gather parameters during the forward (distributed optimizer)."
    )

    @property
    def world_size(self) -> int:
        """Ranks altogether."""
        return self.nproc_per_node * self.num_nodes

    @property
    def data(self) -> int:
        """Data parallel size."""
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
            raise ValueError("parallelism.virtual_pipeline needs parallelism.pipeline of 2 or more")
        if self.sequence and self.tensor == 1:
            raise ValueError("parallelism.sequence needs parallelism.tensor of 2 or more")
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "parallelism.overlap_param_gather needs distributed_optimizer and overlap_grad_reduce: only "
                "sharded parameters are gathered"
            )
        if self.declared_nodes is not None and world % self.declared_nodes:
            raise ValueError(
                f"parallelism.declared_nodes {self.declared_nodes} does not divide the {ranks}; "
                "declared nodes are equal"
            )
        return self
