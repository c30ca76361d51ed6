"""Settings that strategies share, validated and immutable, and environment variables."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, model_validator

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import Settings, setting

PROFILE_VARIABLE, CHECK_VARIABLE = "FSSDP_PROFILE_ITERATIONS", "FSSDP_CHECK_PLANS"


def profile_iterations() -> int:
    """Iterations in which compute, links and memory are measured before costs decide anything.

    Times of the first one, which is cold, count only if it is the only one. Tests set another number.
    """
    return _number_in(PROFILE_VARIABLE, "3", r"0*[1-9][0-9]*", "a whole number of at least 1")


def checks_plans() -> bool:
    """Whether ranks compare a hash of every plan before use, for debugging: ``FSSDP_CHECK_PLANS=1``."""
    return _number_in(CHECK_VARIABLE, "0", "[01]", "0 or 1") == 1


def puts_weights() -> bool:
    """Whether weights for a pass are put into slots inside nodes, not sent: ``FSSDP_PEER_PUTS=1``."""
    return _number_in("FSSDP_PEER_PUTS", "0", "[01]", "0 or 1") == 1


def _number_in(variable: str, default: str, pattern: str, wanted: str) -> int:
    if re.fullmatch(pattern, given := os.environ.get(variable, default)):
        return int(given)
    raise ConfigurationError(
        f"{variable}: got '{given}', wanted {wanted}; change the environment variable or unset it"
    )


CollectiveOrder = Literal["auto", "baseline", "megatron", "s1", "s2"]
SmartScheduleUse = bool | Literal["by_price"]
ExchangeUse = Literal["megatron", "deduplicated", "by_price"]


@dataclass(frozen=True)
class TokenTravel:
    """How the tokens of a layer travel to their experts and back, from the settings of the same names."""

    schedule: CollectiveOrder = "megatron"
    smart_schedule: SmartScheduleUse = False
    group_size: int | None = None
    exchange: ExchangeUse = "megatron"

    @property
    def compares_prices(self) -> bool:
        """Whether modelled seconds decide about the smart schedule or the exchange."""
        return "by_price" in (self.smart_schedule, self.exchange)


class StrategySettings(Settings):
    """Keys of every strategy."""

    model_config = ConfigDict(validate_default=True)

    record_dir: Path | None = setting(
        None, "Folder for metrics.jsonl, the counts of routers and placements.npy. Default: no records."
    )

    @model_validator(mode="after")
    def _refuse_without_effect(self) -> Self:
        for name, field in type(self).model_fields.items():
            extra: Any = field.json_schema_extra or {}
            value = getattr(self, name)
            for cause, values in extra.get("no_effect_if", {}).items():
                if value != field.default and (given := getattr(self, cause)) in values:
                    raise ValueError(
                        f"{name} {_text(value)} has no effect with {cause} {_text(given)}; "
                        f"change {cause}, or remove {name}"
                    )
        return self


class PlacementSettings(StrategySettings):
    """Keys shared by all strategies that run on the placement runtime."""

    nodes: int | None = setting(
        None,
        "Number of equal nodes that the ranks form, in the order of ranks. Default: detected from "
        "LOCAL_WORLD_SIZE, or from host names.",
        ge=1,
    )

    decided_for_all: ClassVar[tuple[str, ...]] = ()
    """Keys that a candidate of ``auto`` cannot set, because all layers share their values."""

    @property
    def travel(self) -> TokenTravel:
        """How tokens travel: as the keys of these names say, or Megatron's way."""
        own = TokenTravel.__dataclass_fields__
        return TokenTravel(**{name: value for name, value in self if name in own})

    def check_num_experts(self, num_experts: int) -> None:
        """Raise a ConfigurationError if a key counts more experts than a layer has."""
        for key in ("slots", "overlap_degree"):
            value = getattr(self, key, None)
            if value is not None and value > num_experts:
                raise ConfigurationError(
                    f"{key}: got {value}, wanted 0 to {num_experts}, the number of experts of a layer; "
                    f"lower it with --moe-strategy-set {key}={num_experts}"
                )


NO_SLOTS = {"slots": (0,)}


class ExchangeKeys(PlacementSettings):
    """The key ``exchange``."""

    exchange: ExchangeUse = setting(
        "megatron",
        "What travels to the experts. 'megatron' sends a token once for each of its experts. "
        "'deduplicated' sends it once to each node that computes one of its experts, and there once to "
        "each such device, which saves bytes if tokens select several experts. 'by_price' does so for the "
        "layers and iterations in which modelled seconds say that it saves time.",
    )

    @model_validator(mode="after")
    def _check_exchange(self) -> Self:
        travel = self.travel
        for key, value in (("smart_schedule", travel.smart_schedule), ("schedule", travel.schedule)):
            # `auto` selects a schedule only where it may.
            if travel.exchange != "megatron" and value not in (False, "megatron"):
                raise ValueError(
                    f"exchange={travel.exchange} and {key}={_text(value)} exclude each other: each has steps "
                    "of its own to send tokens; remove one of them"
                )
        return self


class SlotKeys(ExchangeKeys):
    """Keys of strategies whose replicas live for an iteration or less."""

    decided_for_all: ClassVar[tuple[str, ...]] = ("overlap",)

    slots: int | None = setting(
        None,
        "Maximum number of replicas of a layer on a device (Hecate Alg. 1, m). Default: as many as fit into "
        "the free memory, which is measured in the first iterations. Until then, fssdp has as many as the "
        "device owns experts, in one layer at a time.",
        ge=0,
    )
    overlap: bool = setting(
        True,
        "Whether experts are sent at the same time as tokens. Off: before the tokens.",
        no_effect_if=NO_SLOTS,
    )


class FasterMoEKeys(PlacementSettings):
    """Keys of FasterMoE's smart schedule (§4.2) and topology-aware gate (§4.3)."""

    smart_schedule: SmartScheduleUse = setting(
        False,
        "Whether to use FasterMoE's smart schedule (§4.2): ranks exchange tokens with one group of ranks "
        "after another, and experts compute one group's tokens while the next are sent. 'by_price': in the "
        "layers and iterations in which modelled seconds say that it saves time. Not timed on GPUs.",
    )
    group_size: int | None = setting(
        None,
        "Number of ranks in a group of the smart schedule. It must divide the number of expert-parallel "
        "ranks. Default: the ranks of a node, or one rank if there is only one node.",
        no_effect_if={"smart_schedule": (False,)},
        ge=1,
    )
    router: Literal["stock", "topology_aware"] = setting(
        "stock",
        "Router of the MoE layers. 'topology_aware' is FasterMoE's gate (§4.3), which CHANGES THE ROUTING "
        "and therefore the losses: only the share leaving_share of a rank's tokens can go to other nodes.",
    )
    leaving_share: float | None = setting(
        None,
        "Required for router=topology_aware: share of a rank's tokens that can leave their node. The paper "
        "uses W_net / (M * W_local): the bandwidth of a node's network divided by that of its M devices "
        "inside it.",
        no_effect_if={"router": ("stock",)},
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _check_gate(self) -> Self:
        if self.router == "topology_aware" and self.leaving_share is None:
            raise ValueError(
                "router topology_aware needs leaving_share, a number from 0 to 1: W_net / (M * W_local) for "
                "nodes of M devices, with the bandwidths that megatron-fssdp profile measures"
            )
        return self


def _text(value: object) -> str:
    """A value as users type it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
