"""The MoE layers that Parm was measured with (Table III) and their simulated seconds.

What the table leaves open:

* How 1,296 layers come of it. Four columns of Table IV (8 GPUs of A; 8, 16 and 32 of B) times its four pairs
  of N_MP and N_ESP leave 81 layers for each cell and 324 for each column, and 324 is what Fig. 1 has on 32
  GPUs. The values of B, L, H, M and f make 162, so half of them ran. Which ones is not published, only that
  memory decided. Here it is the half with the fewest numbers in E·T·M = k·f·B·L·M, with which activations
  grow: that has 8 values, each twice the one before, and exactly 81 layers have one of the four smaller.
  Another reading leaves none out: H = M makes 54 of the 162, which with six pairs are 324 as well, those with
  N_MP = 1 (or N_ESP = 1) among them. Table IV has no such pairs.
* k, see ``Assumptions``; E = P / N_ESP, as in §VI-D (2 and 8 experts on 8 and 32 GPUs with N_ESP = 4), so one
  shard of one expert on each GPU. Volumes do not depend on E.
* ``N_ES`` is taken to be N_ESP: H and M are what the table says, times N_ESP.
* B is of a GPU; the N_MP ranks of an MP group have the same samples.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.papers.parm_testbeds import AS_TAKEN, Assumptions, Testbed
from megatron_fssdp.planning.cost.tensor_schedules import (
    Schedule,
    ScheduleCosts,
    ScheduledLayer,
    best_schedule,
)
from megatron_fssdp.simulation.tensor_schedule_timeline import ScheduledSeconds, scheduled_seconds

BATCHES = (2, 4, 8)
LENGTHS = (512, 1024, 2048)
WIDTHS = (1024, 2048, 4096)
CAPACITY_FACTORS = (1.2, 2.4)
PAIRS = ((2, 2), (2, 4), (4, 2), (4, 4))
"""N_MP and N_ESP of Table IV."""

COLUMNS = {"T-A": ("parm-a", 8), "T-B 8": ("parm-b", 8), "T-B 16": ("parm-b", 16), "T-B 32": ("parm-b", 32)}
"""Of Table IV: testbed and P."""

MOST_ROW_NUMBERS = 8 * 1.2 * 2 * 512 * 1024
"""f·B·L·M / N_ESP of the largest layers kept, 8 times that of the smallest; it goes up to 128 times."""


@dataclass(frozen=True)
class ConfiguredLayer:
    """One line of Table III's grid.

    Attributes:
        batch: B.
        length: L.
        ffn_width: H / N_ESP.
        model_width: M / N_ESP.
        capacity_factor: f.
    """

    batch: int
    length: int
    ffn_width: int
    model_width: int
    capacity_factor: float

    @property
    def num_tokens(self) -> int:
        """B·L."""
        return self.batch * self.length

    @property
    def is_small(self) -> bool:
        """Whether it is in the half with the fewest numbers in its rows."""
        return self.capacity_factor * self.num_tokens * self.model_width <= MOST_ROW_NUMBERS


def layers_of(which: str) -> Iterator[ConfiguredLayer]:
    """Layers of one cell of Table IV.

    Args:
        which: As in :class:`Assumptions`; ``unscaled`` are those of the smaller half, see :func:`layer_on`.
    """
    for values in itertools.product(BATCHES, LENGTHS, WIDTHS, WIDTHS, CAPACITY_FACTORS):
        layer = ConfiguredLayer(*values)
        if which == "square":
            is_taken = layer.ffn_width == layer.model_width
        else:
            is_taken = which == "all" or layer.is_small
        if is_taken:
            yield layer


@dataclass(frozen=True)
class LayerSeconds:
    """One layer under each schedule; ``s2_in_turn`` has no SAA: the gather follows the all-to-all."""

    baseline: ScheduledSeconds
    s1: ScheduledSeconds
    s2: ScheduledSeconds
    s2_in_turn: ScheduledSeconds

    @property
    def parm(self) -> ScheduledSeconds:
        """By Alg. 1, which has the very costs that are simulated: the better one."""
        chosen: Schedule = best_schedule({"s1": self.s1.communication_s, "s2": self.s2.communication_s})
        return self.s1 if chosen == "s1" else self.s2

    def speedup(self, name: str) -> float:
        """Of ``s1``, ``s2`` or ``parm`` over the baseline."""
        found: ScheduledSeconds = getattr(self, name)
        return self.baseline.total_s / found.total_s


def seconds_of(scheduled: ScheduledLayer, ffn_size: int, testbed: Testbed) -> LayerSeconds:
    """A layer on a testbed.

    Args:
        scheduled: The layer.
        ffn_size: H, of a whole expert of two matrices.
        testbed: Where.
    """
    costs = testbed.costs(scheduled.n_mp, scheduled.n_esp)
    flops_per_row = 4.0 * scheduled.hidden_size * ffn_size / scheduled.n_esp
    in_turn = {**costs, ("overlapped_all_to_all", "ep_esp"): costs["all_to_all", "ep_esp"]}

    def seconds(schedule: Schedule, costs: ScheduleCosts) -> ScheduledSeconds:
        return scheduled_seconds(schedule, scheduled, costs, flops_per_row, testbed.flops_per_s)

    return LayerSeconds(
        seconds("baseline", costs), seconds("s1", costs), seconds("s2", costs), seconds("s2", in_turn)
    )


def layer_on(layer: ConfiguredLayer, n_mp: int, n_esp: int, testbed: Testbed) -> tuple[ScheduledLayer, int]:
    """What the schedules need of a line of the grid, and H.

    Args:
        layer: The line.
        n_mp: Ranks of an MP group.
        n_esp: Ranks of an ESP group, by which H and M grow.
        testbed: P, k and bytes of a number.
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
    """All layers of a cell of Table IV.

    Args:
        column: Testbed and P.
        pair: N_MP and N_ESP.
        assumptions: What is assumed.
    """
    testbed = Testbed(*COLUMNS[column], assumptions)
    return tuple(
        seconds_of(*layer_on(layer, *pair, testbed), testbed) for layer in layers_of(assumptions.layers)
    )
