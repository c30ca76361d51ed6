"""Settings of the strategies that papers describe: FasterMoE, Pro-Prophet, SmartMoE, FlexMoE and Parm."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from megatron_fssdp.config.strategy.strategy_settings import (
    CollectiveOrder,
    CollectiveSchedule,
    MeasuringSettings,
    PlacementSettings,
)


class FastermoeSettings(MeasuringSettings):
    """``fastermoe``: the most popular experts on all devices (FasterMoE's dynamic shadowing)."""

    counts_of_experts = ("slots",)
    decided_for_all = ("overlap",)

    slots: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Maximum number of shadowed experts of a layer. Default: as many as fit into the free memory. "
            "The paper has no limit."
        ),
    )
    latency: Literal["complete", "paper", "authors"] = Field(
        default="complete",
        description=(
            "Latency that a shadow must reduce. 'paper' is FasterMoE's Eq. 8, which ignores the tokens that "
            "are still sent, and therefore shadows an expert even under balanced loads. 'complete' counts "
            "them. 'authors' is Eq. 8 as the authors' scripts have it: a shadow's transfers are divided by "
            "the number of devices, so that many more experts are shadowed."
        ),
    )
    overlap: bool = Field(
        default=True,
        description="Whether shadowed experts are sent at the same time as tokens. Off: before the tokens.",
    )


class ProphetSettings(MeasuringSettings):
    """``prophet``: popular experts on a subset of the devices, planned ahead (Pro-Prophet)."""

    counts_of_experts = ("slots",)
    decided_for_all = ("overlap",)

    left_out: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Number of devices to which a selected expert is not sent. These are the devices with the fewest "
            "tokens for it (Pro-Prophet §IV-B, n). If it is given, only the paper's Eq. 1 to 8 decide. "
            "Default: the number among 0, 1, 2, 4, … with the fewest seconds over the real links, or no "
            "replicas if they are faster."
        ),
    )
    balance: float = Field(
        default=0.5,
        ge=0,
        description=(
            "Largest accepted difference of device loads, in units of the mean load of an expert "
            "(Pro-Prophet Eq. 7, alpha)."
        ),
    )
    plan_interval: int = Field(
        default=1,
        ge=1,
        description=(
            "Number of iterations for which a plan is reused, because loads change slowly (Pro-Prophet "
            "§IV-C)."
        ),
    )
    slots: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Maximum number of replicas of a layer on a device. Default: as many as fit into the free "
            "memory. The paper has no limit."
        ),
    )
    overlap: bool = Field(
        default=True,
        description=(
            "Whether transfers overlap compute (Pro-Prophet's scheduler). Experts are sent during the "
            "compute before the layer, and gradients during its backward pass. The planner takes this into "
            "account (Eq. 8). Off: transfers and compute run one after the other (Eq. 6)."
        ),
    )
    split: bool = Field(
        default=True,
        description=(
            "Whether transfers that take longer than the compute before the layer are sent in two parts, one "
            "of them during the experts of the layer before (Pro-Prophet §V-B, sub-operators). Needs overlap."
        ),
    )


class SmartmoeSettings(MeasuringSettings):
    """``smartmoe``: owners are exchanged between devices, without replicas (the baseline SmartMoE)."""

    reshard_interval: int = Field(default=25, ge=1, description="Number of iterations between two exchanges.")
    window: int = Field(
        default=25, ge=1, description="Number of iterations whose mean load decides the new owners."
    )
    moves_must_pay: bool = Field(
        default=True,
        description=(
            "Whether an exchange must save more seconds until the next one than it takes. false: owners are "
            "exchanged at every interval, whatever that costs (SmartMoE as Hecate §2.3 describes it)."
        ),
    )


class FlexmoeSettings(MeasuringSettings):
    """``flexmoe``: resident replicas with their own optimizer states (the baseline FlexMoE)."""

    counts_of_experts = ("slots",)
    decided_for_all = ("overlap",)

    slots: int = Field(
        default=1,
        ge=1,
        description=(
            "Number of resident replicas of a layer that a device can hold. Parameters, gradients and "
            "optimizer states of all of them are allocated at the start and kept."
        ),
    )
    placement_interval: int = Field(
        default=25,
        ge=1,
        description="Number of iterations after which replicas are reconsidered.",
    )
    window: int = Field(
        default=25, ge=1, description="Number of iterations whose mean load decides the replicas."
    )
    moves_must_pay: bool = Field(
        default=True,
        description=(
            "Whether a change of the replicas must save more seconds until the next one than its transfer "
            "takes. false: it only has to make an iteration faster (FlexMoE as Hecate §2.3 describes it)."
        ),
    )
    threshold: float = Field(
        default=1.1,
        ge=1,
        description="Max/mean device load above which replicas are added or exchanged (our choice).",
    )
    most_steps: int = Field(
        default=16,
        ge=1,
        description="Maximum number of expansions, and of migrations, of a layer at a time.",
    )
    overlap: bool = Field(
        default=True,
        description="Whether gradients are summed during the backward pass. Off: the pass waits for sums.",
    )


class ParmSettings(PlacementSettings):
    """``parm``: schedules for tensor, expert and expert tensor parallelism together (Parm)."""

    schedule: CollectiveOrder = Field(
        default="auto",
        description=(
            "Order of the collectives. 's1' divides the tokens of tensor-parallel ranks before the gate, "
            "'s2' after it (Parm §III-B). 'baseline' is DeepSpeed-MoE's order. 'megatron' divides the tokens "
            "as s1 does and runs Megatron's collectives of sequence parallelism. 'auto' selects among s1, s2 "
            "and megatron the one with the fewest modelled seconds for the layer's shape. Under sequence "
            "parallelism, s2 is the same as s1."
        ),
    )
    simultaneous: bool = Field(
        default=True,
        description=(
            "Whether s2 passes results on to all tensor-parallel ranks slice by slice while more results "
            "arrive (SAA, Parm §III-D). Off: one collective runs after the other (for comparisons)."
        ),
    )
    cluster: Path | None = Field(
        default=None,
        description=(
            "Cluster description (cluster.yaml of megatron-fssdp profile) from which 'auto' takes the costs "
            "of collectives. Default: they are measured in the layer's first forward pass."
        ),
    )

    @property
    def collective_schedule(self) -> CollectiveSchedule:
        """As set."""
        return CollectiveSchedule(self.schedule, self.simultaneous, self.cluster)

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        if self.cluster is not None and self.schedule != "auto":
            raise ValueError(
                f"cluster {self.cluster} has no meaning under schedule {self.schedule}, because only "
                "schedule auto uses costs; remove cluster, or set schedule to auto"
            )
        return self
