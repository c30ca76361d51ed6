"""Settings of every strategy: frozen, documented, validated.

A strategy's keys are relative to it (``--moe-strategy-set slots=2``), so each
strategy has one flat model here. Common keys live in :class:`StrategySettings`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from megatron_fssdp.config.errors import ConfigurationError

KEEP_OWNERS = "set reshard_interval=0 (under auto smartmoe=false)"
"""The next step for whoever cannot have owners moved."""


class StrategySettings(BaseModel):
    """Keys that every strategy understands."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    record_dir: Path | None = Field(
        default=None,
        description="Folder that receives metrics.jsonl and loads.npz; nothing is recorded without it.",
    )


CollectiveOrder = Literal["auto", "baseline", "megatron", "s1", "s2"]


@dataclass(frozen=True)
class CollectiveSchedule:
    """In which order collectives carry a layer's rows, where ranks share experts or tokens.

    Attributes:
        name: The schedule; ``auto`` selects the one with the fewest modelled seconds.
        simultaneous: Whether schedule s2 hands results on slice by slice (SAA, Parm §III-D).
        cluster: Description of the cluster whose collectives ``auto`` counts with; measured without it.
    """

    name: CollectiveOrder = "megatron"
    simultaneous: bool = True
    cluster: Path | None = None


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
    router: Literal["stock", "topology_aware"] = Field(
        default="stock",
        description=(
            "'topology_aware' is FasterMoE's gate (§4.3), which CHANGES THE ROUTING, and so the losses: only "
            "leaving_share of a rank's tokens may go to another node, the others choose near experts."
        ),
    )
    leaving_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description=(
            "For router=topology_aware, which needs it: part of a rank's tokens that may leave their node, "
            "for each of the k choices. The paper's is W_net / (M * W_local): bandwidth of a node's network "
            "over the M devices' bandwidth inside it."
        ),
    )
    check_plans: bool = Field(
        default=False,
        description="Debug: compare a hash of every plan across the ranks and stop at the first difference.",
    )

    counts_of_experts: ClassVar[tuple[str, ...]] = ()
    """Keys that count experts of a layer, so that no value is above their number."""

    decided_for_all: ClassVar[tuple[str, ...]] = ()
    """Keys of the model's own that one of ``auto``'s candidates cannot set, because all layers share them."""

    @property
    def collective_schedule(self) -> CollectiveSchedule:
        """In which order collectives carry rows."""
        return CollectiveSchedule()

    def as_candidate(self) -> Self:
        """These settings where single layers run under them, as one of ``auto``'s candidates."""
        return self

    def check_num_experts(self, num_experts: int) -> None:
        """Refuse settings that do not fit the number of experts.

        Args:
            num_experts: Routed experts of a layer.

        Raises:
            ConfigurationError: A key counts more experts than there are.
        """
        for key in self.counts_of_experts:
            value = getattr(self, key)
            if value is not None and value > num_experts:
                raise ConfigurationError(
                    f"{key}: got {value}, wanted 0 to {num_experts}, the number of experts of a layer; "
                    f"lower it with --moe-strategy-set {key}={num_experts}"
                )

    @model_validator(mode="after")
    def _check_gate(self) -> Self:
        if self.router == "topology_aware" and self.leaving_share is None:
            raise ValueError(
                "router topology_aware needs leaving_share, a number from 0 to 1: W_net / (M * W_local) for "
                "nodes of M devices, with the bandwidths that megatron-fssdp profile measures"
            )
        if self.router == "stock" and self.leaving_share is not None:
            raise ValueError(
                f"leaving_share {self.leaving_share} has no meaning under router stock: set router to "
                "topology_aware, which changes the routing, or drop leaving_share"
            )
        return self


class SteppedSettings(PlacementSettings):
    """Keys of the strategies that can run under FasterMoE's smart schedule."""

    smart_schedule: bool = Field(
        default=False,
        description=(
            "FasterMoE's smart schedule (§4.2) for any placement: tokens are exchanged with one group of "
            "ranks after another, and experts compute on one group's tokens while the next ones travel."
        ),
    )
    group_size: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Ranks of a group of the smart schedule; must divide the number of expert-parallel ranks. "
            "Default: the ranks of a node; within one node a single rank."
        ),
    )


class ScheduleSettings(SteppedSettings):
    """Keys of the strategies that can run under two of Parm's schedules."""

    schedule: Literal["megatron", "s1"] = Field(
        default="megatron",
        description=(
            "Order of collectives under expert tensor parallelism: 'megatron' sends tokens to one part of an "
            "expert and from there to the others; 's1' is Parm's EP&ESP-AlltoAll, which sends them to all "
            "parts at once, in fewer steps and with more bytes between nodes."
        ),
    )

    @property
    def collective_schedule(self) -> CollectiveSchedule:
        """As set."""
        return CollectiveSchedule(self.schedule)


class EpSettings(ScheduleSettings):
    """``ep``: plain expert parallelism on our runtime; every expert stays with its owner."""


class MeasuringSettings(ScheduleSettings):
    """Keys of the strategies that decide by measured costs."""

    profile_iterations: int = Field(
        default=3,
        ge=1,
        description=(
            "Iterations in which compute, links and memory are measured, for what is decided by them; until "
            "then nothing is."
        ),
    )


class FastermoeSettings(MeasuringSettings):
    """``fastermoe``: the hottest experts on all devices (FasterMoE's dynamic shadowing)."""

    counts_of_experts = ("slots",)
    decided_for_all = ("overlap",)

    slots: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Most experts of a layer that are shadowed. Default: what the free memory holds; the paper has "
            "no bound."
        ),
    )
    latency: Literal["complete", "paper"] = Field(
        default="complete",
        description=(
            "What a shadow has to lower: 'paper' is FasterMoE's Eq. 8, which forgets the tokens that still "
            "travel and so shadows an expert under balanced loads too; 'complete' counts them."
        ),
    )
    overlap: bool = Field(
        default=True,
        description="Bring shadowed experts beside the dispatch of the tokens; off: before it.",
    )


class QuotaSettings(MeasuringSettings):
    """``quota``: exact quotas by each micro-batch's counts (ours, after ECHO and UltraEP)."""

    counts_of_experts = ("slots",)
    decided_for_all = ("overlap",)

    slots: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Other experts of a layer that a device may take over. Default: what the free memory holds."
        ),
    )
    overlap: bool = Field(
        default=True,
        description="Bring experts beside the dispatch of the tokens; off: before it.",
    )


class ProphetSettings(MeasuringSettings):
    """``prophet``: hot experts on a subset of the devices, planned ahead (Pro-Prophet)."""

    counts_of_experts = ("slots",)
    decided_for_all = ("overlap",)

    left_out: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Devices that a selected expert is not sent to, those with the fewest tokens for it (Pro-Prophet "
            "§IV-B, n). Default: of 0, 1, 2, 4, … devices the number, or nothing at all, with the fewest "
            "seconds over the links as they are; the paper's Eq. 1 to 8 alone decide where it is given."
        ),
    )
    balance: float = Field(
        default=0.5,
        ge=0,
        description="How far apart device loads may be, in experts' mean loads (Pro-Prophet Eq. 7, alpha).",
    )
    plan_interval: int = Field(
        default=1,
        ge=1,
        description="Iterations for which a plan is kept, because loads change slowly (Pro-Prophet §IV-C).",
    )
    slots: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Most replicas that a device may hold of a layer. Default: what the free memory holds; the paper "
            "has no bound."
        ),
    )
    overlap: bool = Field(
        default=True,
        description=(
            "The scheduler: experts travel beside the compute before the layer and gradients beside its "
            "backward pass, and the planner counts with it (Pro-Prophet Eq. 8); off: in turn (Eq. 6)."
        ),
    )
    split: bool = Field(
        default=True,
        description=(
            "Transfers that do not fit under the compute before the layer travel in two parts, one of them "
            "beside the experts of the layer before (Pro-Prophet §V-B, sub-operators). Needs overlap."
        ),
    )


class SmartmoeSettings(MeasuringSettings):
    """``smartmoe``: owners exchanged among devices, nothing replicated (the baseline SmartMoE)."""

    reshard_interval: int = Field(
        default=25, ge=1, description="Iterations between two exchanges, and for which one has to pay off."
    )
    window: int = Field(
        default=25, ge=1, description="Iterations whose mean load decides where the experts go."
    )


class FlexmoeSettings(MeasuringSettings):
    """``flexmoe``: replicas that stay, with optimizer states of their own (the baseline FlexMoE)."""

    counts_of_experts = ("slots",)
    decided_for_all = ("overlap",)

    slots: int = Field(
        default=1,
        ge=1,
        description=(
            "Replicas of a layer that a device has room for. Parameters, gradients and optimizer states are "
            "allocated for all of them at the start and stay."
        ),
    )
    placement_interval: int = Field(
        default=25,
        ge=1,
        description="Iterations between two looks at the replicas, and for which a change has to pay off.",
    )
    window: int = Field(default=25, ge=1, description="Iterations whose mean load decides.")
    threshold: float = Field(
        default=1.1,
        ge=1,
        description="Maximum over mean device load above which replicas are added or exchanged; ours.",
    )
    most_steps: int = Field(
        default=16, ge=1, description="Most expansions, and most migrations, of a layer at one look."
    )
    overlap: bool = Field(
        default=True,
        description="Sum gradients beside the rest of the backward pass; off: in turn with it.",
    )


class FssdpSettings(MeasuringSettings):
    """``fssdp``: fully sharded sparse data parallelism (Hecate)."""

    counts_of_experts = ("slots", "overlap_degree")
    decided_for_all = ("overlap", "reshard_interval")

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
    overlap: bool = Field(
        default=True,
        description=(
            "Gather replicas beside the compute before the layer, such as attention, and reduce their "
            "gradients beside its backward pass; off: both in turn with the layer (for comparisons)."
        ),
    )
    split: bool = Field(
        default=False,
        description=(
            "Split transfers that do not fit there, as Pro-Prophet does (§V-B): a part travels beside the "
            "experts of the layer before. Needs overlap, and no rematerialize."
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

    def as_candidate(self) -> Self:
        """Without re-sharding: Alg. 2 is one decision for all layers, whatever is selected for each."""
        return self.model_copy(update={"reshard_interval": 0})

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        slots, degree = self.slots, self.overlap_degree
        if degree == 0 and slots is not None and slots > 0:
            raise ValueError(
                f"overlap_degree 0 and slots {slots} exclude each other: no expert may be replicated, so the "
                f"{slots} slots would stay empty; set slots to 0 or overlap_degree to 1 or more"
            )
        if slots == 0 and degree is not None and degree > 0:
            raise ValueError(
                f"slots 0 and overlap_degree {degree} exclude each other: {degree} experts may be "
                "replicated, but no device has room for a replica; set slots to 1 or more or "
                "overlap_degree to 0"
            )
        return self


class ParmSettings(PlacementSettings):
    """``parm``: schedules for tensor, expert and expert tensor parallelism together (Parm)."""

    schedule: CollectiveOrder = Field(
        default="auto",
        description=(
            "'s1' divides the tokens of tensor-parallel ranks before the gate, 's2' behind it (Parm §III-B); "
            "'baseline' is DeepSpeed-MoE's order; 'megatron' divides the tokens as s1 does and runs the "
            "collectives that Megatron has under sequence parallelism. 'auto' selects the one of s1, s2 and "
            "megatron with the fewest modelled seconds, by the layer's shape. Under sequence parallelism s2 "
            "is s1."
        ),
    )
    simultaneous: bool = Field(
        default=True,
        description=(
            "Under s2, hand results on to all tensor-parallel ranks slice by slice while more come in (SAA, "
            "Parm §III-D); off: one collective after the other (for comparisons)."
        ),
    )
    cluster: Path | None = Field(
        default=None,
        description=(
            "cluster.yaml of megatron-fssdp profile whose collectives 'auto' counts with. Default: the "
            "layer's own are measured in the first forward pass."
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
                f"cluster {self.cluster} has no meaning under schedule {self.schedule}, which is not decided "
                "by costs: drop it, or set schedule to auto"
            )
        return self


class AutoSettings(SteppedSettings):
    """``auto``: for each layer the strategy with the fewest modelled seconds, ``ep`` included (ours)."""

    profile_iterations: int = Field(
        default=3,
        ge=1,
        description=(
            "Iterations in which compute, links and memory are measured; until then every layer is ep."
        ),
    )
    choice_interval: int = Field(
        default=50,
        ge=1,
        description=(
            "Iterations between two choices, and for which moving experts has to pay. The first choice comes "
            "as soon as costs are measured."
        ),
    )
    compared_iterations: int = Field(
        default=3,
        ge=1,
        description="Latest iterations whose loads every candidate is asked to plan for when one is chosen.",
    )
    least_gain: float = Field(
        default=0.03,
        ge=0,
        lt=1,
        description=(
            "Part of a layer's modelled seconds that another strategy has to save before the layer changes "
            "to it, doing nothing included."
        ),
    )

    @property
    def collective_schedule(self) -> CollectiveSchedule:
        """By modelled seconds."""
        return CollectiveSchedule("auto")

    candidate_settings: ClassVar[Mapping[str, type[PlacementSettings]]] = {}
    """Models of the strategies that may be selected beside ``ep``, by name; a key each."""

    @classmethod
    def with_candidates(
        cls, candidates: Mapping[str, tuple[type[PlacementSettings], str]]
    ) -> type["AutoSettings"]:
        """The model with a key for each of these candidates.

        Args:
            candidates: Settings and one line about each strategy, by name.
        """
        fields: dict[str, Any] = {
            name: (
                bool | settings,
                Field(
                    default=True,
                    description=f"Candidate: {summary}. Its settings, true for the defaults, false for none.",
                ),
            )
            for name, (settings, summary) in candidates.items()
        }
        model = create_model(cls.__name__, __base__=cls, __module__=cls.__module__, **fields)
        model.__doc__ = cls.__doc__
        model.candidate_settings = {name: settings for name, (settings, _) in candidates.items()}
        return model

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        for name in self.candidate_settings:
            candidate = getattr(self, name)
            if not isinstance(candidate, PlacementSettings):
                continue
            shared = {*MeasuringSettings.model_fields, *candidate.decided_for_all}
            if wrong := sorted(shared & candidate.model_fields_set):
                known = sorted(set(type(candidate).model_fields) - shared)
                raise ValueError(
                    f"{name}.{wrong[0]} has no meaning for a candidate, because all of them run on one "
                    f"runtime and with the same owners; wanted {', '.join(known)}: drop the key"
                )
        return self

    @property
    def candidates(self) -> dict[str, PlacementSettings]:
        """Settings of what is selected among by name, doing nothing first."""
        found: dict[str, PlacementSettings] = {"ep": EpSettings()}
        for name, model in self.candidate_settings.items():
            given: bool | PlacementSettings = getattr(self, name)
            if given is not False:
                found[name] = (model() if given is True else given).as_candidate()
        return found
