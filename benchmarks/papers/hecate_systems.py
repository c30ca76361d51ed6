"""Simulated runs of Hecate's evaluation: its models, its clusters and the systems that it compares.

Where the text names no cluster, it is B. Fig. 13 is about GPT-MoE-S, because the 90.2 % that
re-materialization saves are near 11/12. Balance makes plain EP on four nodes at most 4 times as fast,
because the busiest NIC has at most 4 times the even traffic; padded EP can gain more.

Compute outside the MoE layers could take 6.7 times as long, so that MoE layers take the 45 % of EP's
iteration that Fig. 10 and 11 imply. That is not assumed, because the 45 % follow from the numbers that they
would explain.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.papers.claims import geometric_mean
from benchmarks.papers.setting import Model, Setting
from benchmarks.papers.systems import MOVING_FLEXMOE, MOVING_SMARTMOE
from megatron_fssdp.simulation.simulator import StrategyOutcome

MODELS = {  # Table 1, and sequences per device
    "GPT-MoE-S": (Model(768, 2048, 12), 4),
    "GPT-MoE-L": (Model(1536, 2048, 12), 4),
    "BERT-MoE": (Model(1024, 512, 12), 16),
    "BERT-MoE-Deep": (Model(1024, 512, 24), 16),
}

FLOPS_PER_S = {"hecate-a": 39e12, "hecate-b": 137e12}
"""Throughput of one GPU in training with Megatron-LM, which Hecate uses (§5.1), as its authors published it.

V100: 39 TFLOP/s (Shoeybi et al. 2019, abstract). A100: 137 TFLOP/s (Narayanan et al. 2021, Table 1, the
smallest model).
"""

LONGER = 1.45
"""Seconds of compute outside the MoE layers, divided by those that follow from its matrix products.

It follows from Fig. 13. Hecate's parameters are 5.73 times EP's, so about 10 experts are sent to all devices
(Alg. 1). They hide under this compute on cluster B if it takes 1.45 times as long.
"""

SETTLED = 12
"""Number of iterations at the start that are not compared. Every system has measured and moved experts."""

MOVES_AT = 6
"""Number of iterations between two moves in the simulation. See :attr:`System.interval`."""


@dataclass(frozen=True)
class System:
    """A system of the paper's evaluation: a strategy with some of its settings."""

    strategy: str
    keys: Mapping[str, object] = field(default_factory=dict)
    interval: int = 0
    """Number of iterations between two moves of experts in the paper, or 0 if no expert moves.

    The seconds of a move are spread over them, so that few iterations have to be simulated.
    """

    def outcome(self, setting: Setting) -> StrategyOutcome:
        """Simulate the system."""
        return setting.run(self.strategy, **self.keys)

    def seconds(self, setting: Setting) -> float:
        """Return the mean seconds of an iteration, with the share of a move that belongs to it."""
        outcome = self.outcome(setting)
        moves_s = outcome.parts_s["re-sharding"][SETTLED:]
        mean_s = float((outcome.iteration_s[SETTLED:] - moves_s).mean())
        if not self.interval:
            return mean_s
        return mean_s + float(moves_s.mean()) * MOVES_AT / self.interval

    def having(self, **keys: object) -> "System":
        """Return the system with other values of some settings."""
        return replace(self, keys={**self.keys, **keys})


EP = System("ep")
HECATE = System("fssdp", {"planner": "hecate", "reshard_interval": MOVES_AT}, 100)
"""Alg. 1 and 2 with measured limits. Experts are re-sharded every 100 iterations (§5.1)."""

REMATERIALIZED = HECATE.having(rematerialize=True)

FLEXMOE_SLOTS = 4
"""Replicas of a layer that a device has room for: its memory is 1.83 · 1.64 = 3.0 times EP's (§5.3).

A device owns 2 experts of a layer, so the other two thirds are 4 replicas.
"""

BASELINES = {
    "FasterMoE": System("fastermoe", {"smart_schedule": True}),
    "SmartMoE": System(MOVING_SMARTMOE, {"reshard_interval": MOVES_AT, "window": 5}, 25),
    "FlexMoE": System(
        MOVING_FLEXMOE,
        {"placement_interval": MOVES_AT, "window": 5, "slots": FLEXMOE_SLOTS, "overlap": False},
        25,
    ),
}
"""Systems with which Hecate is compared, as Hecate describes them (§1, §2.3).

SmartMoE and FlexMoE move experts at their interval, whatever that costs. The best interval of SmartMoE is 25
(§1), and the same is assumed of FlexMoE. FlexMoE sums the gradients of replicas at the end of an iteration,
so that nothing hides the sums (§1).
"""

SYSTEMS = {"EP": EP, "Hecate": HECATE, "Hecate-RM": REMATERIALIZED, **BASELINES}


def setting_of(model: str, cluster: str, sigma: float, devices: int = 32, **others: object) -> Setting:
    """Return the setting of one of the paper's models. Weak scaling: 32 experts on 16 devices (§5.2)."""
    shape, sequences = MODELS[model]
    pace = FLOPS_PER_S[cluster]
    given: dict[str, object] = {"flops_per_s": (pace, pace / LONGER), **others}
    sequences = int(str(given.pop("sequences", sequences)))
    return replace(Setting(shape, cluster, sigma, devices, 2 * devices, 2, sequences), **given)  # type: ignore[arg-type]


def over_ep(setting: Setting, system: System) -> float:
    """Return the speed-up of a system over EP."""
    return EP.seconds(setting) / system.seconds(setting)


def over_best(
    settings: list[Setting], ours: System = HECATE, baselines: Mapping[str, System] = BASELINES
) -> float:
    """Return the geometric mean over settings of the fastest baseline's seconds divided by Hecate's."""
    return geometric_mean(
        [
            min(system.seconds(setting) for system in baselines.values()) / ours.seconds(setting)
            for setting in settings
        ]
    )
