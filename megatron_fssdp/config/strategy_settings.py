"""Settings of every strategy, validated and immutable.

Each strategy has one settings model. Its keys are given without the strategy's name, for example
``--moe-strategy-set slots=2``. :class:`StrategySettings` has the keys of all strategies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from megatron_fssdp.config.errors import ConfigurationError

KEEP_OWNERS = "set reshard_interval=0 (under auto smartmoe=false)"
"""Advice in error messages for setups in which owners cannot be moved."""


class StrategySettings(BaseModel):
    """Keys of every strategy."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    record_dir: Path | None = Field(
        default=None,
        description="Folder for metrics.jsonl, loads.npy and placements.npy. Default: no records.",
    )


CollectiveOrder = Literal["auto", "baseline", "megatron", "s1", "s2"]


@dataclass(frozen=True)
class CollectiveSchedule:
    """Order of the collectives of a layer, where several ranks share experts or tokens.

    Attributes:
        name: Name of the schedule. ``auto`` selects the one with the fewest modelled seconds.
        simultaneous: Whether schedule s2 passes results on slice by slice (SAA, Parm §III-D).
        cluster: Cluster description from which ``auto`` takes the costs of collectives. None: they are
            measured.
    """

    name: CollectiveOrder = "megatron"
    simultaneous: bool = True
    cluster: Path | None = None


class NoneSettings(StrategySettings):
    """``none``: Megatron's own dispatcher and experts, unchanged."""


class PlacementSettings(StrategySettings):
    """Keys shared by all strategies that run on the placement runtime."""

    nodes: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Number of equal nodes that the ranks form, in the order of ranks. Default: detected from "
            "LOCAL_WORLD_SIZE, or from host names."
        ),
    )
    router: Literal["stock", "topology_aware"] = Field(
        default="stock",
        description=(
            "Router of the MoE layers. 'stock' is Megatron's. 'topology_aware' is FasterMoE's gate (§4.3), "
            "which CHANGES THE ROUTING and therefore the losses: only the share leaving_share of a rank's "
            "tokens can go to other nodes. All other tokens go to experts in their own node."
        ),
    )
    leaving_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description=(
            "Required for router=topology_aware: share of a rank's tokens that can leave their node, for "
            "each of the k choices. The paper uses W_net / (M * W_local): the bandwidth of a node's network "
            "divided by the bandwidth of its M devices inside the node."
        ),
    )
    leaving_choices: Literal["each", "one"] = Field(
        default="each",
        description=(
            "Which choices of a token leaving_share limits. 'each': the share holds for each of the k "
            "choices. 'one': only one choice of a token can leave, the best one, and its other choices stay "
            "in the node, as in the gate that FasterMoE's authors published."
        ),
    )
    check_plans: bool = Field(
        default=False,
        description="Debugging: compare a hash of every plan across ranks, and stop at the first difference.",
    )

    counts_of_experts: ClassVar[tuple[str, ...]] = ()
    """Keys that count experts of a layer. Their values cannot exceed the number of experts."""

    decided_for_all: ClassVar[tuple[str, ...]] = ()
    """Keys that a candidate of ``auto`` cannot set, because all layers share their values."""

    @property
    def collective_schedule(self) -> CollectiveSchedule:
        """Order of the collectives of a layer."""
        return CollectiveSchedule()

    def as_candidate(self) -> Self:
        """Return these settings as a candidate of ``auto`` uses them, for single layers."""
        return self

    def check_num_experts(self, num_experts: int) -> None:
        """Refuse settings that do not fit the number of experts.

        Args:
            num_experts: Number of routed experts of a layer.

        Raises:
            ConfigurationError: The value of a key is larger than the number of experts.
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
                f"leaving_share {self.leaving_share} has no meaning under router stock; set router to "
                "topology_aware, which changes the routing, or remove leaving_share"
            )
        if self.router == "stock" and self.leaving_choices != "each":
            raise ValueError(
                f"leaving_choices {self.leaving_choices} has no meaning under router stock; set router to "
                "topology_aware, which changes the routing, or remove leaving_choices"
            )
        return self


SmartScheduleUse = bool | Literal["by_price"]


ExchangeUse = Literal["pairs", "deduplicated", "by_price"]


class SteppedSettings(PlacementSettings):
    """Keys of strategies that can use FasterMoE's smart schedule or the deduplicated exchange."""

    smart_schedule: SmartScheduleUse = Field(
        default=False,
        description=(
            "Whether to use FasterMoE's smart schedule (§4.2), for any placement. Ranks exchange tokens with "
            "one group of ranks after another. Experts compute one group's tokens while the next tokens are "
            "sent. 'by_price': each layer uses it in the iterations in which modelled seconds say that it "
            "saves time. The default is false, because weight gradients cannot be fused under the other two "
            "values and no GPU has run the smart schedule yet."
        ),
    )
    group_size: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Number of ranks in a group of the smart schedule. It must divide the number of expert-parallel "
            "ranks. Default: the ranks of a node, or one rank if there is only one node."
        ),
    )
    exchange: ExchangeUse = Field(
        default="pairs",
        description=(
            "What travels to the experts. 'pairs' sends a token once for each of its experts, as "
            "Megatron does. 'deduplicated' sends it once to each node that computes one of its experts, and "
            "there once to each such device. This saves bytes if tokens select several experts. 'by_price': "
            "each layer sends tokens once in the iterations in which modelled seconds say that it saves time."
        ),
    )

    @property
    def compares_prices(self) -> bool:
        """Whether modelled seconds decide about the smart schedule or the exchange."""
        return "by_price" in (self.smart_schedule, self.exchange)

    @model_validator(mode="after")
    def _check_exchange(self) -> Self:
        if self.exchange != "pairs" and self.smart_schedule:
            raise _exclusive(self.exchange, f"smart_schedule={str(self.smart_schedule).lower()}")
        return self


def _exclusive(exchange: ExchangeUse, other: str) -> ValueError:
    return ValueError(
        f"exchange={exchange} and {other} exclude each other: each has steps of its own to send tokens; "
        "remove one of them"
    )


class ScheduleSettings(SteppedSettings):
    """Keys of strategies that can use two of Parm's schedules."""

    schedule: Literal["megatron", "s1"] = Field(
        default="megatron",
        description=(
            "Order of the collectives under expert tensor parallelism. 'megatron' sends tokens to one part "
            "of an expert, and from there to the other parts. 's1' is Parm's EP&ESP-AlltoAll: it sends "
            "tokens to all parts at once, with fewer steps and more bytes between nodes."
        ),
    )

    @property
    def collective_schedule(self) -> CollectiveSchedule:
        """As set."""
        return CollectiveSchedule(self.schedule)

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.exchange != "pairs" and self.schedule != "megatron":
            raise _exclusive(self.exchange, f"schedule={self.schedule}")
        return self


class MeasuringSettings(ScheduleSettings):
    """Keys of strategies that decide by measured costs."""

    profile_iterations: int = Field(
        default=3,
        ge=1,
        description=(
            "Number of iterations in which compute, links and memory are measured. Times of the first one, "
            "which is cold, count only if it is the only one. Decisions that need these costs start after "
            "them."
        ),
    )


class EpSettings(MeasuringSettings):
    """``ep``: plain expert parallelism on this plugin's runtime. Every expert stays with its owner."""


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


class QuotaSettings(MeasuringSettings):
    """``quota``: exact token quotas from each micro-batch's counts (our strategy, after ECHO and UltraEP)."""

    counts_of_experts = ("slots",)
    decided_for_all = ("overlap",)

    slots: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Maximum number of a layer's other experts that a device can compute. Default: as many as fit "
            "into the free memory."
        ),
    )
    overlap: bool = Field(
        default=True,
        description="Whether experts are sent at the same time as tokens. Off: before the tokens.",
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
    dispatch_policy: Literal["even", "balanced"] = Field(
        default="even",
        description=(
            "How an expert's tokens are divided among its holders. 'even' is the paper's policy: equal parts "
            "for the nearest holders. 'balanced' is our policy: it uses the exact counts to send the most "
            "tokens to those of the nearest holders that have the fewest. It takes host time in every "
            "micro-batch."
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
    calibrate: bool | None = Field(
        default=None,
        description=(
            "Whether replicas are corrected after the gate by the exact counts of an iteration's first "
            "micro-batch, where the measured costs show that this saves time. Default: replicas are added "
            "and dropped if modelled seconds decide (planner 'balanced' without overlap_degree), otherwise "
            "nothing. true: otherwise, replicas are added to free slots (Hecate §4.2). false: nothing."
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


class AutoSettings(SteppedSettings):
    """``auto``: selects for each layer the strategy with the fewest modelled seconds (our strategy)."""

    profile_iterations: int = Field(
        default=3,
        ge=1,
        description=(
            "Number of iterations in which compute, links and memory are measured. Times of the first one, "
            "which is cold, count only if it is the only one. Until then, every layer uses ep."
        ),
    )
    choice_interval: int = Field(
        default=50,
        ge=1,
        description=(
            "Number of iterations after which strategies are reconsidered. Moved experts must pay off within "
            "this time. The first selection happens as soon as costs are measured."
        ),
    )
    compared_iterations: int = Field(
        default=3,
        ge=1,
        description="Number of the latest iterations for which every candidate plans when one is selected.",
    )
    least_gain: float = Field(
        default=0.03,
        ge=0,
        lt=1,
        description=(
            "Share of a layer's modelled seconds that another strategy, ep included, must save before the "
            "layer changes to it."
        ),
    )

    @property
    def collective_schedule(self) -> CollectiveSchedule:
        """The schedule ``auto``, which is selected by modelled seconds.

        Tokens that are sent once travel in Megatron's order.
        """
        return CollectiveSchedule("auto" if self.exchange == "pairs" else "megatron")

    candidate_settings: ClassVar[Mapping[str, type[PlacementSettings]]] = {}
    """Settings models of the strategies that can be selected in addition to ``ep``, by name.

    Each one is a key.
    """

    @classmethod
    def with_candidates(
        cls, candidates: Mapping[str, tuple[type[PlacementSettings], str]]
    ) -> type["AutoSettings"]:
        """Return a settings model with a key for each candidate.

        Args:
            candidates: Settings model and one-line summary of each strategy, by name.
        """
        fields: dict[str, Any] = {
            name: (
                bool | settings,
                Field(
                    default=True,
                    description=(
                        f"Candidate: {summary}. true: with default settings. false: not a candidate. A "
                        "mapping: with these settings."
                    ),
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
                found[name] = (model() if given is True else given).as_candidate()
        return found
