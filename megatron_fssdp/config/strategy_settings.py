"""Settings of every strategy: frozen, documented, validated.

A strategy's keys are relative to it (``--moe-strategy-set slots=2``), so each
strategy has one flat model here. Common keys live in :class:`StrategySettings`.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class StrategySettings(BaseModel):
    """Keys that every strategy understands."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    record_dir: Path | None = Field(
        default=None,
        description="Folder that receives metrics.jsonl and loads.npz; nothing is recorded without it.",
    )


class NoneSettings(StrategySettings):
    """``none``: Megatron's own dispatcher and experts, untouched."""


class PlacementSettings(StrategySettings):
    """Keys shared by all strategies that run on the placement runtime."""

    nodes: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Number of equal nodes the ranks are declared to form, in rank order. "
            "Default: detected from LOCAL_WORLD_SIZE, or from host names."
        ),
    )
    check_plans: bool = Field(
        default=False,
        description="Debug: compare a hash of every plan across the ranks and stop at the first difference.",
    )


class EpSettings(PlacementSettings):
    """``ep``: plain expert parallelism on our runtime; every expert stays with its owner."""


class FssdpSettings(PlacementSettings):
    """``fssdp``: fully sharded sparse data parallelism (Hecate)."""

    window: int = Field(
        default=5, ge=1, description="Iterations whose mean load predicts the next one (Hecate §4.2, w)."
    )
    slots: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Extra expert slots a device can hold for one layer (Hecate Alg. 1, m). Default: what the "
            "free memory holds after the first profile_iterations; until then as many as the device "
            "owns experts of the layer."
        ),
    )
    overlap_degree: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Most experts of a layer that may be replicated (Hecate Alg. 1, t). Default: with planner "
            "'balanced' as many as save more seconds than they cost, by what the first profile_iterations "
            "measure; with 'hecate' as many as travel within the compute before the layer; until that is "
            "measured, all of them."
        ),
    )
    planner: Literal["balanced", "hecate"] = Field(
        default="balanced",
        description=(
            "'hecate' is the paper's Alg. 1 and nothing else. 'balanced' is ours: the same slots and "
            "limits, searched for the placement with the lowest modelled maximum device load; it never "
            "ends above plain expert parallelism, which Alg. 1 can."
        ),
    )
    dispatch_policy: Literal["even", "balanced"] = Field(
        default="even",
        description=(
            "How an expert's tokens are split among the devices that hold it. 'even' is the paper's: equal "
            "parts for the nearest holders. 'balanced' is ours: the nearest holders as well, and by the "
            "exact counts most for those that have least; costs the host time in every micro-batch."
        ),
    )
    profile_iterations: int = Field(
        default=3,
        ge=1,
        description=(
            "Iterations in which compute and memory are measured, for slots and overlap_degree where they "
            "are not given, and for calibrate."
        ),
    )
    overlap: bool = Field(
        default=True,
        description=(
            "Gather replicas beside the compute before the layer, such as attention, and reduce their "
            "gradients beside its backward pass; off: both in turn with the layer (for comparisons)."
        ),
    )
    rematerialize: bool = Field(
        default=False,
        description=(
            "Release replicas after a layer's forward pass and gather them again before its backward pass "
            "(Hecate §4.2): replicas of one layer at a time instead of all, for one more gather per "
            "micro-batch."
        ),
    )
    calibrate: bool = Field(
        default=False,
        description=(
            "Add replicas after the gate where the exact counts of an iteration's first micro-batch make "
            "it worth the wait, by the measured costs (Hecate §4.2)."
        ),
    )
    reshard_interval: int = Field(
        default=100,
        ge=0,
        description=(
            "Iterations between re-shardings of all layers' owners (Hecate Alg. 2); 0 keeps Megatron's "
            "even owners."
        ),
    )
