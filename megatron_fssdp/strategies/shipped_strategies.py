"""The shipped strategies: their settings, and what the registry is told of them.

Command lines read this file, so it imports no planner.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, create_model, model_validator

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_registry import RegisteredStrategy, shipped
from megatron_fssdp.config.strategy.strategy_settings import (
    NO_SLOTS,
    CollectiveOrder,
    ExchangeKeys,
    FasterMoEKeys,
    PlacementSettings,
    SlotKeys,
    StrategySettings,
    TokenTravel,
)


class NoneSettings(StrategySettings):
    """``none``: Megatron's own dispatcher and experts."""


class EpSettings(ExchangeKeys, FasterMoEKeys):
    """``ep``: plain expert parallelism: every expert stays with its owner."""

    schedule: Literal["megatron", "s1"] = setting(
        "megatron",
        "Order of the collectives under expert tensor parallelism. 'megatron' sends tokens to one part of "
        "an expert, and from there to the others. 's1' is Parm's EP&ESP-AlltoAll, which sends tokens to "
        "all parts at once, with fewer steps and more bytes between nodes.",
    )


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
        "'balanced' searches for the placement with the fewest modelled seconds, which is never worse than "
        "plain expert parallelism. 'hecate' is the paper's system: Alg. 1, and calibration (§4.2), which "
        "adds replicas to free slots after the gate where that saves time. The host then waits for the "
        "counts of an iteration's first micro-batch in every layer.",
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


class ProphetSettings(SlotKeys):
    """``prophet``: Pro-Prophet: hot experts on some of the devices, planned ahead."""

    left_out: int | None = setting(
        None,
        "Number of devices to which a selected expert is not sent: those with the fewest tokens for it "
        "(Pro-Prophet §IV-B, n). If it is given, only the paper's Eq. 1 to 8 decide. Default: the number "
        "among 0, 1, 2, 4, … with the fewest seconds over the real links, or no replicas if they are faster.",
        no_effect_if=NO_SLOTS,
        ge=0,
    )
    overlap: bool = setting(
        True,
        "Whether transfers overlap compute (Pro-Prophet's scheduler): experts during the compute before "
        "the layer, those that take longer in two parts, one of them during the experts of the layer before "
        "(§V-B), and gradients during the backward pass, in one part. The planner takes this into account "
        "(Eq. 8). Off: one runs after the other (Eq. 6).",
        no_effect_if=NO_SLOTS,
    )


class FastermoeSettings(SlotKeys, FasterMoEKeys):
    """``fastermoe``: FasterMoE: the hottest experts of each micro-batch on all devices."""

    latency: Literal["complete", "paper", "authors"] = setting(
        "complete",
        "Latency that a shadow must reduce. 'paper' is FasterMoE's Eq. 8, which ignores the tokens that "
        "are still sent, and therefore shadows an expert even under balanced loads. 'complete' counts "
        "them. 'authors' is Eq. 8 as in the authors' scripts, which divide a shadow's transfers by the "
        "number of devices.",
        no_effect_if=NO_SLOTS,
    )


class QuotaSettings(SlotKeys):
    """``quota``: exact quotas of tokens for each micro-batch, experts follow."""


class SmartmoeSettings(ExchangeKeys):
    """``smartmoe``: SmartMoE: owners are exchanged among devices, nothing is replicated."""

    reshard_interval: int = setting(25, "Number of iterations between two exchanges.", ge=1)
    window: int = setting(25, "Number of iterations whose mean load decides the new owners.", ge=1)


class FlexmoeSettings(ExchangeKeys):
    """``flexmoe``: FlexMoE: resident replicas with optimizer states of their own."""

    slots: int = setting(
        1,
        "Number of resident replicas of a layer that a device can hold. Parameters, gradients and optimizer "
        "states of all of them are allocated at the start and kept.",
        ge=1,
    )
    placement_interval: int = setting(25, "Number of iterations after which replicas are reconsidered.", ge=1)
    window: int = setting(25, "Number of iterations whose mean load decides the replicas.", ge=1)
    overlap: bool = setting(
        True, "Whether gradients are summed during the backward pass. Off: the pass waits for sums."
    )


class ParmSettings(PlacementSettings):
    """``parm``: Parm: schedules for tensor, expert and expert tensor parallelism together."""

    schedule: CollectiveOrder = setting(
        "auto",
        "Order of the collectives. 's1' divides the tokens of tensor-parallel ranks before the gate, 's2' "
        "after it (Parm §III-B); under sequence parallelism both are the same. 'baseline' is "
        "DeepSpeed-MoE's order. 'megatron' divides the tokens as s1 does and runs Megatron's collectives "
        "of sequence parallelism. 'auto' selects among s1, s2 and megatron the one with the fewest "
        "modelled seconds for the layer's shape.",
    )


class AutoSettings(ExchangeKeys):
    """``auto``: for each layer the strategy with the fewest modelled seconds."""

    choice_interval: int = setting(
        50,
        "Number of iterations after which strategies are reconsidered. The first selection happens as soon "
        "as costs are measured; until then, every layer uses ep.",
        ge=1,
    )

    candidate_settings: ClassVar[Mapping[str, type[Any]]] = {}
    """Settings models of the candidates in addition to ``ep``; the table of strategies adds their keys."""

    @classmethod
    @cache
    def with_candidates(cls, candidates: tuple[RegisteredStrategy, ...]) -> type[Self]:
        """The same keys, and one for each candidate."""
        also = "true: with default settings. false: not a candidate. A mapping: with these settings."
        keys: dict[str, Any] = {
            entry.name: (
                bool | entry.settings,
                Field(default=True, description=f"Candidate: {entry.summary}. {also}"),
            )
            for entry in candidates
        }
        model = create_model(
            cls.__name__, __base__=cls, __module__=cls.__module__, __doc__=cls.__doc__, **keys
        )
        model.candidate_settings = {entry.name: entry.settings for entry in candidates}
        return model

    @property
    def travel(self) -> TokenTravel:
        """The schedule is selected by modelled seconds; tokens that are sent once have Megatron's."""
        schedule: CollectiveOrder = "auto" if self.exchange == "megatron" else "megatron"
        return replace(super().travel, schedule=schedule)

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        for name in self.candidate_settings:
            candidate = getattr(self, name)
            if not isinstance(candidate, PlacementSettings):
                continue
            shared = {*EpSettings.model_fields, *candidate.decided_for_all}
            if wrong := sorted(shared & candidate.model_fields_set):
                known = sorted(set(type(candidate).model_fields) - shared)
                raise ValueError(
                    f"{name}.{wrong[0]} has no meaning for a candidate, because all candidates share one "
                    f"runtime and the same owners; wanted {', '.join(known)}; remove the key"
                )
        return self

    @property
    def candidates(self) -> dict[str, PlacementSettings]:
        """Settings of all candidates by name. ``ep`` is the first."""
        found: dict[str, PlacementSettings] = {"ep": EpSettings()}
        for name, model in self.candidate_settings.items():
            given: bool | PlacementSettings = getattr(self, name)
            if given is not False:
                found[name] = model() if given is True else given
        return found


# Where `auto` finds candidates equal it takes the first one, so what moves least comes first. Colour-blind
# readers can tell the colours apart.
SHIPPED_STRATEGIES = (
    shipped(NoneSettings, None, "#7F7F7F", is_ranked=False),
    shipped(EpSettings, "ep_strategy:EpStrategy", "#0072B2"),
    shipped(FssdpSettings, "fssdp.fssdp_strategy:FssdpStrategy", "#D55E00", is_candidate=True),
    shipped(ProphetSettings, "prophet_strategy:ProphetStrategy", "#CC79A7"),
    shipped(FastermoeSettings, "fastermoe_strategy:FastermoeStrategy", "#009E73"),
    shipped(QuotaSettings, "quota_strategy:QuotaStrategy", "#AA4499"),
    shipped(SmartmoeSettings, "smartmoe_strategy:SmartmoeStrategy", "#56B4E9"),
    shipped(FlexmoeSettings, "flexmoe_strategy:FlexmoeStrategy", "#E69F00"),
    # What is Parm's own is how tokens travel, which is the runtime's business; owners stay.
    shipped(ParmSettings, "ep_strategy:EpStrategy", "#999933", is_ranked=False),
    shipped(AutoSettings, "auto_strategy:build_auto", "#8C564B", is_ranked=False),
)
