"""``fssdp``: fully sharded sparse data parallelism (Hecate): replicas by recent loads."""

from typing import Literal, Self

from pydantic import model_validator

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.config.strategy.strategy_settings import NO_SLOTS, SlotKeys

PlanSource = Literal["past", "first", "each"]
"""From which counts ``fssdp`` plans replicas (``exact_plans.py``)."""


NO_REPLICAS = {**NO_SLOTS, "overlap_degree": (0,)}


class FssdpSettings(SlotKeys):
    """``fssdp``: fully sharded sparse data parallelism (Hecate): replicas by recent loads."""

    decided_for_all = ("overlap", "reshard_interval")
    overlap_degree: int | None = setting(
        None,
        "Maximum number of experts of a layer that can be replicated (Hecate Alg. 1, t). Default with "
        "planner 'balanced': as many as save more seconds than they cost, by the costs that the first "
        "iterations measure. With 'hecate': as many as can be sent during the compute before the layer. "
        "Until then: all experts.",
        ge=0,
    )
    planner: Literal["balanced", "hecate"] = setting(
        "balanced",
        "'balanced' searches for the placement with the fewest modelled seconds, owners alone among them. "
        "'hecate' is the paper's system: Alg. 1, and calibration (§4.2), which adds replicas to free slots "
        "after the gate where that saves time. The host then waits for the counts of an iteration's first "
        "micro-batch in every layer.",
    )
    overlap: bool = setting(
        True,
        "Whether replicas are gathered during the compute before the layer, such as attention, and their "
        "gradients are reduced during its backward pass. Off: the layer waits for both (for comparisons).",
        no_effect_if=NO_REPLICAS,
    )
    rematerialize: bool | None = setting(
        None,
        "Whether replicas are released after a layer's forward pass and gathered again before its backward "
        "pass (Hecate §4.2). Memory then holds the replicas of one layer, for one more gather per "
        "micro-batch. Default: in the layers in which it saves modelled seconds, because too few replicas "
        "fit otherwise; nowhere with 'slots', 'overlap_degree' or planner 'hecate'.",
        no_effect_if=NO_REPLICAS,
    )
    planned_from: Literal["by_price"] | PlanSource = setting(
        "by_price",
        "Counts from which replicas are planned, with planner 'balanced' and without overlap_degree. 'past': "
        "those of earlier iterations. 'first': the plan is corrected by the exact counts of an iteration's "
        "first micro-batch. 'each': every micro-batch is planned by its own exact counts, and its replicas "
        "live as long as it does. The host waits for exact counts. 'by_price': what would have saved "
        "modelled seconds in the last iterations, for each layer.",
        no_effect_if={**NO_REPLICAS, "planner": ("hecate",)},
    )
    reshard_interval: int = setting(
        100,
        "Number of iterations between re-shards of all layers (Hecate Alg. 2). With planner 'balanced' and "
        "without overlap_degree, owners move only if that saves more modelled seconds until the next one "
        "than it takes. 0 keeps Megatron's even owners.",
        ge=0,
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        slots, degree = self.slots, self.overlap_degree
        if 0 in (slots, degree) and (slots or degree):
            raise ValueError(
                f"slots {slots} and overlap_degree {degree} exclude each other: one forbids the replicas "
                "that the other allows; set both to 0, or both to 1 or more"
            )
        if self.planned_from != "by_price" and degree is not None:
            raise ValueError(
                f"planned_from {self.planned_from} has no effect with overlap_degree, under which seconds do "
                "not decide; remove one of them"
            )
        if self.planned_from == "each" and self.rematerialize:
            raise ValueError(
                "planned_from each and rematerialize exclude each other: replicas live for a micro-batch, or "
                "for a pass; remove one of them"
            )
        return self


ENTRY = shipped(FssdpSettings, "fssdp.fssdp_strategy:FssdpStrategy", "#D55E00", is_candidate=True)
