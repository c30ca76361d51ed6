"""The MoE layers on which Parm was measured (Table III), and their simulated seconds.

The table leaves some points open. This module assumes the following:

* The 1,296 layers: "H/N_ES and M/N_ES" is one line of the table, so H = M. B, L, H = M and f then give 54
  combinations. Six pairs of N_MP and N_ESP times 54 are the 324 layers on 32 GPUs (Fig. 1), and four columns
  of Table IV times 324 are the 1,296 (§VI-A). No layer is left out. The six pairs are here those with
  N_ESP > 1, because the paper is about MP+EP+ESP. With the six of N_MP > 1 the counts are the same, and the
  smallest simulated speed-up is 1.19 in place of 1.08 (paper: 1.13). Table IV shows four of the six pairs.
* Variant ``smaller half``: H and M differ, and each of the four pairs of Table IV ran the 81 of 162
  combinations with the smallest E·T·M = k·f·B·L·M, because activations grow with it. This also gives 324 and
  1,296, but the half is a guess.
* k: see ``Assumptions``. E = P / N_ESP, as in §VI-D (2 and 8 experts on 8 and 32 GPUs with N_ESP = 4), so
  each GPU has one shard of one expert. Volumes do not depend on E.
* ``N_ES`` means N_ESP: H and M are the table's values times N_ESP.
* B is the batch size of one GPU. The N_MP ranks of an MP group have the same samples.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.papers.parm_testbeds import AS_TAKEN, Assumptions, Testbed
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.tensor_schedules import (
    Schedule,
    ScheduleCosts,
    ScheduledLayer,
    schedule_seconds,
)

BATCHES = (2, 4, 8)
LENGTHS = (512, 1024, 2048)
WIDTHS = (1024, 2048, 4096)
CAPACITY_FACTORS = (1.2, 2.4)
PAIRS = ((2, 2), (2, 4), (4, 2), (4, 4))
"""Pairs of N_MP and N_ESP in Table IV."""

ALL_PAIRS = ((1, 2), (1, 4), *PAIRS)
"""Pairs of N_MP and N_ESP that ran (see above)."""

COLUMNS = {"T-A": ("parm-a", 8), "T-B 8": ("parm-b", 8), "T-B 16": ("parm-b", 16), "T-B 32": ("parm-b", 32)}
"""Columns of Table IV: testbed and number of GPUs, P."""

MOST_ROW_NUMBERS = 8 * 1.2 * 2 * 512 * 1024
"""f·B·L·M / N_ESP of the largest selected layers: 8 times the smallest value. The maximum is 128 times."""


@dataclass(frozen=True)
class ConfiguredLayer:
    """One combination of values of Table III: B, L, H / N_ESP, M / N_ESP and f."""

    batch: int
    length: int
    ffn_width: int
    model_width: int
    capacity_factor: float

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a GPU, B·L."""
        return self.batch * self.length


def layers_of(which: str) -> Iterator[ConfiguredLayer]:
    """Yield the layers of one cell of Table IV.

    Args:
        which: Selection of layers, as in :class:`Assumptions`. ``unscaled`` selects those of ``square`` (see
            :func:`layer_on`).
    """
    for values in itertools.product(BATCHES, LENGTHS, WIDTHS, WIDTHS, CAPACITY_FACTORS):
        layer = ConfiguredLayer(*values)
        if which == "smaller half":
            is_taken = layer.capacity_factor * layer.num_tokens * layer.model_width <= MOST_ROW_NUMBERS
        else:
            is_taken = which == "all" or layer.ffn_width == layer.model_width
        if is_taken:
            yield layer


@dataclass(frozen=True)
class ScheduledSeconds:
    """Seconds of a layer's collectives and experts, which never overlap, in both passes."""

    communication_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        """Seconds of communication and compute together."""
        return self.communication_s + self.compute_s

    @property
    def communication_share(self) -> float:
        """Share of communication in the total seconds, from 0 to 1."""
        return self.communication_s / self.total_s


def scheduled_seconds(
    schedule: Schedule,
    layer: ScheduledLayer,
    costs: ScheduleCosts,
    flops_per_row: float,
    flops_per_s: float,
) -> ScheduledSeconds:
    """Compute the seconds of a layer with even loads: Parm's Eq. 1, 11 and 14 in each pass, plus the experts.

    The backward pass has the transposed collectives of the forward pass, of equal sizes.

    Args:
        schedule: Name of the schedule: ``baseline``, ``megatron``, ``s1`` or ``s2``.
        layer: Sizes and parallelism of the layer.
        costs: Costs of all collectives of the schedule.
        flops_per_row: Operations of the forward pass of one row in a device's part of an expert.
        flops_per_s: Throughput of a device on experts, in operations per second.
    """
    # Only the baseline computes every row once for each MP rank (Parm, §III-A).
    repeats = schedule == "baseline" and not layer.is_split
    rows = layer.num_rows * layer.n_esp / (1 if repeats else layer.n_mp)
    forward_s = rows * flops_per_row / flops_per_s
    return ScheduledSeconds(
        communication_s=2 * schedule_seconds(schedule, layer, costs),
        compute_s=(1 + BACKWARD_PER_FORWARD) * forward_s,
    )


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer under each schedule.

    ``s2_in_turn`` has no SAA: its gather follows the all-to-all.
    """

    baseline: ScheduledSeconds
    s1: ScheduledSeconds
    s2: ScheduledSeconds
    s2_in_turn: ScheduledSeconds

    @property
    def parm(self) -> ScheduledSeconds:
        """The faster one of S1 and S2, which Alg. 1 selects because it knows exactly the simulated costs."""
        return min(self.s1, self.s2, key=lambda seconds: seconds.communication_s)

    def speedup(self, name: str) -> float:
        """Return the speed-up of ``s1``, ``s2`` or ``parm`` over the baseline."""
        schedule: ScheduledSeconds = getattr(self, name)
        return self.baseline.total_s / schedule.total_s


def seconds_of(scheduled: ScheduledLayer, ffn_size: int, testbed: Testbed) -> LayerSeconds:
    """Return the seconds of a layer on a testbed, under each schedule."""
    costs = testbed.costs(scheduled.n_mp, scheduled.n_esp)
    flops_per_row = 4.0 * scheduled.hidden_size * ffn_size / scheduled.n_esp
    in_turn = {**costs, ("overlapped_all_to_all", "ep_esp"): costs["all_to_all", "ep_esp"]}

    def seconds(schedule: Schedule, costs: ScheduleCosts) -> ScheduledSeconds:
        return scheduled_seconds(schedule, scheduled, costs, flops_per_row, testbed.flops_per_s)

    return LayerSeconds(
        seconds("baseline", costs), seconds("s1", costs), seconds("s2", costs), seconds("s2", in_turn)
    )


def layer_on(layer: ConfiguredLayer, n_mp: int, n_esp: int, testbed: Testbed) -> tuple[ScheduledLayer, int]:
    """Return the sizes of a layer that the schedules need, and H.

    Args:
        layer: Combination of values of Table III.
        n_mp: Number of ranks of an MP group.
        n_esp: Number of ranks of an ESP group. H and M are multiplied by it.
        testbed: Testbed, which gives P, k and the bytes of a number.
    """
    assumptions = testbed.assumptions
    growth = 1 if assumptions.layers == "unscaled" else n_esp
    scheduled = ScheduledLayer(
        num_tokens=layer.num_tokens,
        hidden_size=growth * layer.model_width,
        num_rows=assumptions.top_k * layer.capacity_factor * layer.num_tokens,
        n_mp=n_mp,
        n_esp=n_esp,
        n_ep=testbed.num_devices // n_esp,
        element_bytes=assumptions.element_bytes,
    )
    return scheduled, growth * layer.ffn_width


@cache
def cell_of(
    column: str, pair: tuple[int, int], assumptions: Assumptions = AS_TAKEN
) -> tuple[LayerSeconds, ...]:
    """Return the seconds of all layers of a cell of Table IV."""
    testbed = Testbed(*COLUMNS[column], assumptions)
    return tuple(
        seconds_of(*layer_on(layer, *pair, testbed), testbed) for layer in layers_of(assumptions.layers)
    )
