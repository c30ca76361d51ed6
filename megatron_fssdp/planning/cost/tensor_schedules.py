"""The collectives of an MoE layer under tensor and expert tensor parallelism, and their costs (Parm).

Such a layer has three kinds of groups: MP, the N_MP tensor-parallel ranks, which have the same tokens without
sequence parallelism; ESP, the N_ESP ranks that share each expert; and EP, the N_EP ranks over which the
experts are distributed. EP&ESP is the group of all ranks of EP and ESP together.

Sizes are those of the paper, the length of the whole tensor: after a gather, before a scatter, and in an
all-to-all everything that one rank sends, with its own part.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_fssdp.planning.cost.cost_model import LinkCost

Schedule = Literal["baseline", "megatron", "s1", "s2"]
"""Order of collectives: DeepSpeed-MoE's (``baseline``), Parm's (``s1``, ``s2``) or ours (``megatron``).

Ours divides tokens as ``s1`` does and runs the collectives of Megatron's sequence parallelism.
"""

LEAST_SLICE_BYTES = 1 << 19
"""Smallest slice for which SAA takes a step; a smaller one has little to hide."""

Group = Literal["mp", "esp", "ep", "ep_esp"]

Kind = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce", "overlapped_all_to_all"]
"""``overlapped_all_to_all`` is what an all-to-all adds to a simultaneous MP-AllGather (Parm's SAA)."""


class Collective(NamedTuple):
    """One collective of a forward pass: its kind, the group that takes part, and the whole tensor's bytes."""

    kind: Kind
    over: Group
    num_bytes: float


@dataclass(frozen=True)
class ScheduledLayer:
    """The sizes on which the collectives of a layer depend (Parm, Table I).

    Attributes:
        num_tokens: Number of tokens of one MP group, B·L.
        hidden_size: Model dimension, M, in numbers of ``element_bytes``.
        num_rows: Number of (token, k) pairs that are sent, E·T. With a capacity factor f it is k·f·B·L.
        is_split: Whether the ranks of an MP group have different tokens, as under sequence parallelism.
    """

    num_tokens: float
    hidden_size: int
    num_rows: float
    n_mp: int = 1
    n_esp: int = 1
    n_ep: int = 1
    element_bytes: int = 4
    is_split: bool = False

    @property
    def tokens_bytes(self) -> float:
        """Bytes of the tokens of an MP group, Parm's x = B·L·M."""
        return self.num_tokens * self.hidden_size * self.element_bytes

    @property
    def rows_bytes(self) -> float:
        """Bytes of all rows that are sent, E·T·M; Parm's y is this times N_ESP, a copy for each part."""
        return self.num_rows * self.hidden_size * self.element_bytes

    @property
    def slices_pay(self) -> bool:
        """Whether SAA should send the results of one device's experts for one rank in a step of their own."""
        return self.n_ep > 1 and self.rows_bytes / self.n_mp / self.n_ep >= LEAST_SLICE_BYTES


def collectives_of(schedule: Schedule, layer: ScheduledLayer) -> tuple[Collective, ...]:
    """The collectives of a forward pass in their order, without those of a single rank.

    A backward pass has their transposes: it gathers where the forward pass splits, and the reverse.
    """
    rows_bytes, dumped_bytes = layer.rows_bytes, layer.rows_bytes * layer.n_esp
    own = dumped_bytes / layer.n_mp
    leaving = () if layer.is_split else (Collective("all_gather", "mp", layer.tokens_bytes),)
    if schedule == "baseline":
        # Parm, Eq. 1. Under sequence parallelism each rank has only 1 / N_MP of the tokens.
        share = layer.n_mp if layer.is_split else 1
        exchange = Collective("all_to_all", "ep", dumped_bytes / share)
        entering = Collective("all_gather", "esp", layer.tokens_bytes * layer.n_esp / share)
        summing = Collective("all_reduce", "esp", dumped_bytes / share)
        collectives: tuple[Collective, ...] = (entering, exchange, summing, exchange)
    elif schedule == "megatron":
        exchange = Collective("all_to_all", "ep", rows_bytes / layer.n_mp)
        of_parts = (Collective("all_gather", "esp", own), Collective("reduce_scatter", "esp", own))
        collectives = (exchange, *of_parts, exchange, *leaving)
    elif schedule == "s1" or layer.is_split or layer.n_mp == 1:
        # Eq. 11, or Eq. 2. If tokens are split before the gate, or if MP has one rank, S2 is the same as S1.
        exchange = Collective("all_to_all", "ep_esp", own)
        collectives = (exchange, exchange, *leaving)
    else:
        # Eq. 14, with N_ESP as in Eq. 7.
        kinds: tuple[Kind, ...] = ("all_to_all", "overlapped_all_to_all")
        exchanges = (Collective(kind, "ep_esp", own) for kind in kinds)
        collectives = (*exchanges, Collective("all_gather", "mp", rows_bytes))
    sizes = {"mp": layer.n_mp, "esp": layer.n_esp, "ep": layer.n_ep, "ep_esp": layer.n_ep * layer.n_esp}
    return tuple(collective for collective in collectives if sizes[collective.over] > 1)


ScheduleCosts = Mapping[tuple[Kind, Group], LinkCost]
"""Cost of each collective in each kind of group: ``alpha + beta * num_bytes`` (Parm, §V-A, Eq. 12)."""


def schedule_seconds(schedule: Schedule, layer: ScheduledLayer, costs: ScheduleCosts) -> float:
    """Seconds of the collectives of a forward pass (Parm, Eq. 1, 11 and 14); all costs must be known."""
    return math.fsum(costs[kind, over].time_s(size) for kind, over, size in collectives_of(schedule, layer))


def predicted_seconds(
    layer: ScheduledLayer, costs: ScheduleCosts, among: tuple[Schedule, ...]
) -> dict[Schedule, float]:
    """:func:`schedule_seconds` of each schedule of ``among`` whose costs are all known, in the same order."""
    return {
        schedule: schedule_seconds(schedule, layer, costs)
        for schedule in among
        if all((kind, over) in costs for kind, over, _ in collectives_of(schedule, layer))
    }
