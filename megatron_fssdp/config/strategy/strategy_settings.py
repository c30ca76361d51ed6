"""Settings that strategies share, validated and immutable; also those of ``none`` and ``ep``.

Each strategy has one settings model. Its keys are given without the strategy's name, for example
``--moe-strategy-set slots=2``. :class:`StrategySettings` has the keys of all strategies. The models of single
strategies are in ``paper_strategy_settings.py``, ``fssdp_settings.py`` and ``own_strategy_settings.py``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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


ExchangeUse = Literal["megatron", "deduplicated", "by_price"]


class SteppedSettings(PlacementSettings):
    """Keys of strategies that can use FasterMoE's smart schedule or the deduplicated exchange."""

    smart_schedule: SmartScheduleUse = Field(
        default=False,
        description=(
            "Whether to use FasterMoE's smart schedule (§4.2), for any placement. Ranks exchange tokens with "
            "one group of ranks after another. Experts compute one group's tokens while the next tokens are "
            "sent. 'by_price': each layer uses it in the iterations in which modelled seconds say that it "
            "saves time. The default is false, because no GPU has run the smart schedule yet."
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
        default="megatron",
        description=(
            "What travels to the experts. 'megatron' sends a token once for each of its experts, as "
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
        if self.exchange != "megatron" and self.smart_schedule:
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
        if self.exchange != "megatron" and self.schedule != "megatron":
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
