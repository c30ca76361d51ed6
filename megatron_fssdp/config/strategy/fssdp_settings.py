"""Settings of ``fssdp``."""

from typing import Literal, Self

from pydantic import Field, model_validator

from megatron_fssdp.config.strategy.strategy_settings import MeasuringSettings


class FssdpSettings(MeasuringSettings):
    """``fssdp``: fully sharded sparse data parallelism (Hecate)."""

    counts_of_experts = ("slots", "overlap_degree")
    decided_for_all = ("overlap", "reshard_interval")

    window: int = Field(
        default=5,
        ge=1,
        description="Number of iterations whose mean load predicts the next iteration (Hecate §4.2, w).",
    )
    slots: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Maximum number of replicas of a layer on a device (Hecate Alg. 1, m). Default: as many as fit "
            "into the free memory after the first profile_iterations. Until then: the number of the layer's "
            "experts that the device owns."
        ),
    )
    overlap_degree: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Maximum number of experts of a layer that can be replicated (Hecate Alg. 1, t). Default with "
            "planner 'balanced': as many as save more seconds than they cost, by the costs that the first "
            "profile_iterations measure. Default with 'hecate': as many as can be sent during the compute "
            "before the layer. Until costs are measured: all experts."
        ),
    )
    planner: Literal["balanced", "hecate"] = Field(
        default="balanced",
        description=(
            "'hecate' is exactly the paper's Alg. 1. 'balanced' is our planner: with the same slots and "
            "limits, it searches for the placement with the lowest modelled maximum device load. Its result "
            "is never worse than plain expert parallelism, while that of Alg. 1 can be."
        ),
    )
    dispatch_policy: Literal["even", "exact"] | None = Field(
        default=None,
        description=(
            "How an expert's tokens are divided among its holders. 'even' is the paper's policy: equal parts "
            "for the nearest holders. 'exact' is our policy: the device computes parts from the exact counts "
            "of every micro-batch, so that device loads become even. It takes one more small gather, "
            "and more tokens travel. The host waits under neither. Default: each layer's placement is "
            "dispatched in the way with the fewest modelled seconds, where these decide (planner 'balanced' "
            "without overlap_degree, and not exchange 'deduplicated'); otherwise evenly."
        ),
    )
    overlap: bool = Field(
        default=True,
        description=(
            "Whether replicas are gathered during the compute before the layer, such as attention, and their "
            "gradients are reduced during its backward pass. Off: the layer waits for both (for comparisons)."
        ),
    )
    split: bool | None = Field(
        default=None,
        description=(
            "Whether transfers that take longer than this compute are split, as in Pro-Prophet (§V-B): one "
            "part is sent during the experts of the layer before. Needs overlap, and excludes rematerialize. "
            "Default: true if modelled seconds decide (planner 'balanced' without overlap_degree)."
        ),
    )
    rematerialize: bool = Field(
        default=False,
        description=(
            "Whether replicas are released after a layer's forward pass and gathered again before its "
            "backward pass (Hecate §4.2). Memory then holds the replicas of one layer instead of all layers, "
            "for one more gather per micro-batch."
        ),
    )
    calibrate: bool = Field(
        default=False,
        description=(
            "Whether replicas are added to free slots after the gate (Hecate §4.2, calibration) by the exact "
            "counts of an iteration's first micro-batch and where the measured costs show that this saves "
            "time. The host then waits for these counts in every layer."
        ),
    )
    reshard_interval: int = Field(
        default=100,
        ge=0,
        description=(
            "Number of iterations between re-shards of all layers (Hecate Alg. 2). If overlap_degree is not "
            "given, modelled seconds decide: owners move only where that pays, and are reconsidered at "
            "intervals that adapt, up to this one. 0 keeps Megatron's even owners."
        ),
    )

    def as_candidate(self) -> Self:
        """Return these settings without re-sharding, because Alg. 2 decides for all layers together."""
        return self.model_copy(update={"reshard_interval": 0})

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        slots, degree = self.slots, self.overlap_degree
        if degree == 0 and slots is not None and slots > 0:
            raise ValueError(
                f"overlap_degree 0 and slots {slots} exclude each other: no expert can be replicated, so the "
                f"{slots} slots would stay empty; set slots to 0 or overlap_degree to 1 or more"
            )
        if slots == 0 and degree is not None and degree > 0:
            raise ValueError(
                f"slots 0 and overlap_degree {degree} exclude each other: {degree} experts can be "
                "replicated, but no device has room for a replica; set slots to 1 or more or "
                "overlap_degree to 0"
            )
        return self
