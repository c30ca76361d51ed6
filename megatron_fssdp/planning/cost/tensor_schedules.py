"""What an MoE layer's collectives are under tensor and expert tensor parallelism, and what they cost (Parm).

Three kinds of groups meet in such a layer: MP, the N_MP tensor-parallel ranks, which without sequence
parallelism all have the same tokens; ESP, the N_ESP ranks that share each expert; EP, over which the
experts are distributed. EP&ESP are the ranks of both.

Sizes are the paper's: the length of the whole tensor, so after a gather, before a scatter, and in an
all-to-all all that one rank sends, its own part included.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_fssdp.planning.cost.cost_model import LinkCost

Schedule = Literal["baseline", "megatron", "s1", "s2"]
"""Order of a layer's collectives. ``baseline`` is DeepSpeed-MoE's, ``s1`` and ``s2`` are Parm's. ``megatron``
is ours: it divides tokens as ``s1`` does and runs the collectives that Megatron has under sequence
parallelism."""

LEAST_SLICE_BYTES = 1 << 19
"""A slice of SAA costs all ranks a step; below this there is hardly anything to hide (docs/log.md)."""

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

Group = Literal["mp", "esp", "ep", "ep_esp"]

Kind = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce", "overlapped_all_to_all"]
"""``overlapped_all_to_all`` is what an all-to-all adds to an MP-AllGather that runs beside it (SAA)."""


@dataclass(frozen=True)
class Collective:
    """One collective of a forward pass.

    Attributes:
        kind: What is done.
        over: Among which ranks.
        num_bytes: Length of the whole tensor.
    """

    kind: Kind
    over: Group
    num_bytes: float


@dataclass(frozen=True)
class ScheduledLayer:
    """What the collectives of a layer depend on (Parm, Table I).

    Attributes:
        num_tokens: B·L, tokens of one model-parallel group.
        hidden_size: M.
        num_rows: E·T, (token, k) pairs that are sent; k·f·B·L with a capacity factor f.
        n_mp: Ranks of an MP group.
        n_esp: Ranks of an ESP group.
        n_ep: Ranks of an EP group.
        element_bytes: Of one number of a token.
        is_split: The ranks of an MP group have different tokens already: sequence parallelism.
    """

    num_tokens: float
    hidden_size: int
    num_rows: float
    n_mp: int = 1
    n_esp: int = 1
    n_ep: int = 1
    element_bytes: int = 4
    is_split: bool = False

    def __post_init__(self) -> None:
        if min(self.n_mp, self.n_esp, self.n_ep) < 1:
            raise ValueError(
                f"n_mp is {self.n_mp}, n_esp {self.n_esp}, n_ep {self.n_ep}: wanted groups of 1 rank or more"
            )

    @property
    def tokens_bytes(self) -> float:
        """Parm's x = B·L·M, in bytes."""
        return self.num_tokens * self.hidden_size * self.element_bytes

    @property
    def rows_bytes(self) -> float:
        """E·T·M, in bytes."""
        return self.num_rows * self.hidden_size * self.element_bytes

    @property
    def dumped_bytes(self) -> float:
        """Parm's y = E·T·M·N_ESP, in bytes: a copy of every row for each part of its expert."""
        return self.rows_bytes * self.n_esp

    @property
    def slices_pay(self) -> bool:
        """Whether the results of one device's experts for one rank are worth a step of their own (SAA)."""
        return self.n_ep > 1 and self.rows_bytes / self.n_mp / self.n_ep >= LEAST_SLICE_BYTES


def collectives_of(schedule: Schedule, layer: ScheduledLayer) -> tuple[Collective, ...]:
    """The collectives of a forward pass, in order; groups of a single rank have none.

    A backward pass has their transposes, of the same sizes: gathers for splits and the reverse.

    Args:
        schedule: Which order.
        layer: What it is about.
    """
    own = layer.dumped_bytes / layer.n_mp
    leaving = () if layer.is_split else (Collective("all_gather", "mp", layer.tokens_bytes),)
    if schedule == "baseline":
        # Parm, Eq. 1. Under sequence parallelism each rank brings 1 / N_MP of the tokens only.
        share = layer.n_mp if layer.is_split else 1
        found: tuple[Collective, ...] = (
            Collective("all_gather", "esp", layer.tokens_bytes * layer.n_esp / share),
            Collective("all_to_all", "ep", layer.dumped_bytes / share),
            Collective("all_reduce", "esp", layer.dumped_bytes / share),
            Collective("all_to_all", "ep", layer.dumped_bytes / share),
        )
    elif schedule == "megatron":
        found = (
            Collective("all_to_all", "ep", layer.rows_bytes / layer.n_mp),
            Collective("all_gather", "esp", own),
            Collective("reduce_scatter", "esp", own),
            Collective("all_to_all", "ep", layer.rows_bytes / layer.n_mp),
            *leaving,
        )
    elif schedule == "s1" or layer.is_split or layer.n_mp == 1:
        # With tokens that are split before the gate, or a single MP rank, S2 is S1.
        exchange = Collective("all_to_all", "ep_esp", own)
        found = (exchange, exchange, *leaving)  # Eq. 11, or Eq. 2
    else:
        # Eq. 14 with N_ESP, as Eq. 7 has it.
        found = (
            Collective("all_to_all", "ep_esp", own),
            Collective("overlapped_all_to_all", "ep_esp", own),
            Collective("all_gather", "mp", layer.rows_bytes),
        )
    sizes = {
        "mp": layer.n_mp,
        "esp": layer.n_esp,
        "ep": layer.n_ep,
        "ep_esp": layer.n_ep * layer.n_esp,
    }
    return tuple(collective for collective in found if sizes[collective.over] > 1)


def rows_of_device(schedule: Schedule, layer: ScheduledLayer) -> float:
    """Rows that a device computes, each with its part of an expert, where loads are even.

    Only ``baseline`` computes everything N_MP times where the MP ranks have the same tokens (Parm, §III-A).

    Args:
        schedule: Which order.
        layer: What it is about.
    """
    is_repeated = schedule == "baseline" and not layer.is_split
    return layer.num_rows * layer.n_esp / (1 if is_repeated else layer.n_mp)


ScheduleCosts = Mapping[tuple[Kind, Group], LinkCost]
"""Seconds of each collective among each kind of ranks: ``alpha + beta * num_bytes`` (Parm, §V-A, Eq. 12)."""


def schedule_seconds(schedule: Schedule, layer: ScheduledLayer, costs: ScheduleCosts) -> float:
    """Seconds of a forward pass's collectives (Parm, Eq. 1, 11 and 14).

    Args:
        schedule: Which order.
        layer: What it is about.
        costs: Of all collectives of the schedule.

    Raises:
        KeyError: A cost is missing.
    """
    return math.fsum(
        costs[collective.kind, collective.over].time_s(collective.num_bytes)
        for collective in collectives_of(schedule, layer)
    )


def is_known(schedule: Schedule, layer: ScheduledLayer, costs: ScheduleCosts) -> bool:
    """Whether there are costs for all of a schedule's collectives."""
    return all((found.kind, found.over) in costs for found in collectives_of(schedule, layer))


def predicted_seconds(
    layer: ScheduledLayer, costs: ScheduleCosts, among: tuple[Schedule, ...]
) -> dict[Schedule, float]:
    """Modelled seconds of the schedules that there are costs for."""
    return {
        schedule: schedule_seconds(schedule, layer, costs)
        for schedule in among
        if is_known(schedule, layer, costs)
    }


def best_schedule(predicted: Mapping[Schedule, float]) -> Schedule:
    """The schedule with the fewest modelled seconds; the first of equals (Parm, Alg. 1: S1 before S2).

    Args:
        predicted: Of each candidate, in order of preference; at least one.
    """
    return min(predicted, key=lambda schedule: predicted[schedule])
