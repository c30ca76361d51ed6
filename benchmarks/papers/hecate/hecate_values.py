"""Simulated values of the statements in Hecate's text.

Functions take the spread of the loads and return the values of one statement, or return such a function.
"""

from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.papers.hecate.hecate_runs import (
    BASELINES,
    EP,
    HECATE,
    MODELS,
    REMATERIALIZED,
    SETTLED,
    System,
    geometric_mean,
    over_best,
    over_ep,
    setting_of,
    speedups,
)
from benchmarks.papers.setting import OF_MOE_LAYERS, Setting

Values = Callable[[float], list[float]]

PLACES = (("hecate-a", 16), ("hecate-a", 32), ("hecate-b", 32))
"""Clusters and numbers of GPUs of Fig. 9 and 10."""

IMPLIED_SHARE = (1 - 1 / 1.70) / (1 - 1 / 11.87)
"""Largest share of EP's iteration in MoE layers that the paper's numbers allow, GPT-MoE-S on cluster B: 0.45.

The layers are 11.87 times as fast (Fig. 11) and the iteration is at most 1.70 times as fast (Fig. 10).
"""

COMPARED = ("GPT-MoE-S", "BERT-MoE")
"""Models with which single causes are varied."""


def slowdown(sigma: float) -> list[float]:
    """Largest seconds of EP on cluster A, divided by those with even loads."""
    return [
        max(
            EP.seconds(setting_of(model, "hecate-a", sigma)) / EP.seconds(setting_of(model, "hecate-a", 0.0))
            for model in MODELS
        )
    ]


def of_models(cluster: str, devices: int, system: System = HECATE) -> Values:
    """Speed-up of a system over EP for each model."""
    return lambda sigma: [over_ep(setting_of(model, cluster, sigma, devices), system) for model in MODELS]


def even_loads(cluster: str, devices: int) -> Callable[[float], str]:
    """Words on what EP would gain from perfectly even loads, smallest and largest of the models."""

    def bound(sigma: float) -> str:
        found = [
            EP.seconds(setting_of(model, cluster, sigma, devices))
            / EP.seconds(setting_of(model, cluster, 0.0, devices))
            for model in MODELS
        ]
        return f"even loads without replicas: {min(found):.2f}–{max(found):.2f}"

    return bound


def _moe_s(setting: Setting, system: System) -> float:
    return float(setting.moe_s_I(system.strategy, **system.keys)[SETTLED:].mean())


def share_of_moe(sigma: float) -> list[float]:
    """Share of EP's iteration in the MoE layers, GPT-MoE-S on cluster B."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    return [_moe_s(setting, EP) / EP.seconds(setting)]


def with_share_of_moe(cluster: str, devices: int) -> Values:
    """Hecate over EP for each model, if EP's MoE layers took :data:`IMPLIED_SHARE` of its iteration."""

    def ratios(sigma: float) -> list[float]:
        settings = [setting_of(model, cluster, sigma, devices) for model in MODELS]
        gains = [_moe_s(setting, EP) / _moe_s(setting, HECATE) for setting in settings]
        return [1 / (1 - IMPLIED_SHARE + IMPLIED_SHARE / gain) for gain in gains]

    return ratios


def baseline_over_ep(name: str) -> Values:
    """Smallest and largest speed-up of a baseline over EP on 16 and 32 GPUs of cluster A."""

    def ratios(sigma: float) -> list[float]:
        found = [
            value for devices in (16, 32) for value in of_models("hecate-a", devices, BASELINES[name])(sigma)
        ]
        return [min(found), max(found)]

    return ratios


def over_best_of_models(devices: int) -> Values:
    """Geometric mean over models on cluster A: seconds of the fastest baseline divided by Hecate's."""
    return lambda sigma: [over_best([setting_of(model, "hecate-a", sigma, devices) for model in MODELS])]


def over_best_with(
    ours: System = HECATE,
    baselines: Mapping[str, Mapping[str, object]] | None = None,
    spread: float | None = None,
    without: tuple[str, ...] = (),
    **others: object,
) -> Values:
    """Seconds of the fastest baseline divided by Hecate's, on 16 and 32 GPUs of cluster A, after a change.

    Args:
        ours: Hecate's system.
        baselines: Changed settings of baselines, by name.
        spread: Another spread of the loads.
        without: Names of baselines that are left out.
        others: Changed attributes of the setting.
    """
    changed = {
        name: one.having(**(baselines or {}).get(name, {}))
        for name, one in BASELINES.items()
        if name not in without
    }

    def ratios(sigma: float) -> list[float]:
        return [
            over_best(
                [setting_of(model, "hecate-a", spread or sigma, devices, **others) for model in COMPARED],
                ours,
                changed,
            )
            for devices in (16, 32)
        ]

    return ratios


def over_baselines(sigma: float) -> list[float]:
    """Geometric mean over models and baselines on cluster B: seconds of the baseline divided by Hecate's."""
    *baselines, ours = speedups("hecate-b", 32, sigma).values()
    return [
        geometric_mean([one / other for values in baselines for one, other in zip(ours, values, strict=True)])
    ]


def largest(sigma: float) -> list[float]:
    """Largest speed-up over a baseline in Fig. 9 and 10."""
    found = []
    for cluster, devices in PLACES:
        *baselines, ours = speedups(cluster, devices, sigma).values()
        found += [one / other for values in baselines for one, other in zip(ours, values, strict=True)]
    return [max(found)]


def largest_over_ep(system: System) -> Values:
    """Largest speed-up of a system over EP in the settings of Fig. 9 and 10."""
    return lambda sigma: [max(value for place in PLACES for value in of_models(*place, system)(sigma))]


def rematerialized_over_baselines(sigma: float) -> list[float]:
    """Seconds of each baseline divided by those of Hecate-RM, BERT-MoE-Deep on cluster B."""
    setting = setting_of("BERT-MoE-Deep", "hecate-b", sigma)
    return [one.seconds(setting) / REMATERIALIZED.seconds(setting) for one in BASELINES.values()]


def layers(sigma: float) -> list[float]:
    """Speed-up of each MoE layer over EP, without other compute, in ascending order."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    plain, ours = (system.outcome(setting).of_layers("moe_s") for system in (EP, HECATE))
    return sorted((plain.mean(axis=0) / ours.mean(axis=0)).tolist())


def mean_of_layers(sigma: float) -> list[float]:
    """Geometric mean of the speed-ups of the layers."""
    return [geometric_mean(layers(sigma))]


def all_to_all(sigma: float) -> list[float]:
    """Seconds of EP's all-to-alls divided by Hecate's, BERT-MoE-Deep on cluster B."""
    setting = setting_of("BERT-MoE-Deep", "hecate-b", sigma)
    plain, ours = (system.outcome(setting).parts_s["all-to-all"].mean() for system in (EP, HECATE))
    return [float(plain / ours)]


def collectives(sigma: float) -> list[float]:
    """Seconds of the sparse collectives of Hecate-RM divided by Hecate's, hidden ones included."""
    setting = setting_of("BERT-MoE-Deep", "hecate-b", sigma)
    again, once = (
        sum(
            end - begin
            for lane, name, begin, end in system.outcome(setting).spans(-1)
            if lane == "transfer" and name.startswith("sp")
        )
        for system in (REMATERIALIZED, HECATE)
    )
    return [again / once]


def parameters(system: System) -> Values:
    """Parameters on a device divided by EP's, GPT-MoE-S on cluster B."""

    def ratio(sigma: float) -> list[float]:
        setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
        plain, ours = (one.outcome(setting).memory.experts for one in (EP, system))
        held = ours.slot_parameters_bytes + ours.replica_parameters_bytes
        return [held / plain.slot_parameters_bytes]

    return ratio


def memory(system: System, over: System | None = None) -> Values:
    """Memory of the experts divided by EP's or another system's, GPT-MoE-S on cluster B.

    The paper counts optimizer states, gradients and parameters, but no buffers of transfers.
    """

    def ratio(sigma: float) -> list[float]:
        setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
        ours = system.outcome(setting).memory.experts
        held = ours.total_bytes - ours.transfer_buffers_bytes
        if over is None:
            return [held / EP.outcome(setting).memory.experts.expert_parallelism_bytes]
        theirs = over.outcome(setting).memory.experts
        return [held / (theirs.total_bytes - theirs.transfer_buffers_bytes)]

    return ratio


def saved_by_rematerialization(sigma: float) -> list[float]:
    """Share of the replicas' parameters that re-materialization saves, GPT-MoE-S on cluster B."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    kept, released = (
        system.outcome(setting).memory.experts.replica_parameters_bytes for system in (HECATE, REMATERIALIZED)
    )
    return [1 - released / kept if kept else 0.0]


def slower_with_rematerialization(sigma: float) -> list[float]:
    """Seconds of Hecate-RM divided by Hecate's at 2 and 4 sequences, GPT-MoE-S on cluster B."""
    settings = [setting_of("GPT-MoE-S", "hecate-b", sigma, sequences=sequences) for sequences in (2, 4)]
    return [REMATERIALIZED.seconds(setting) / HECATE.seconds(setting) for setting in settings]


def intervals(sigma: float) -> list[float]:
    """Speed-up over EP of sharding alone at intervals of 10 to 100 iterations, with all moves."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma, num_iterations=200)
    alone = HECATE.having(slots=0, overlap_degree=0)
    plain_s = EP.outcome(setting).iteration_s[100:].mean()
    return [
        float(plain_s / alone.having(reshard_interval=every).outcome(setting).iteration_s[100:].mean())
        for every in (10, 25, 50, 100)
    ]


def both_over(**keys: object) -> Values:
    """Seconds with one component of Hecate divided by those with both, GPT-MoE-S on cluster B."""

    def ratio(sigma: float) -> list[float]:
        setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
        return [HECATE.having(**keys).seconds(setting) / HECATE.seconds(setting)]

    return ratio


def intervals_of_smartmoe(*, with_moves: bool) -> Values:
    """Seconds of the MoE layers with exchanges every 10 iterations, divided by those with 25, cluster A."""

    def ratio(sigma: float) -> list[float]:
        setting = setting_of("GPT-MoE-S", "hecate-a", sigma, num_iterations=100)
        parts = (*OF_MOE_LAYERS, *(("re-sharding",) if with_moves else ()))
        often, seldom = (
            BASELINES["SmartMoE"].having(reshard_interval=every).outcome(setting).parts_s
            for every in (10, 25)
        )
        often_s, seldom_s = (
            float(np.sum([found[part][50:].mean() for part in parts])) for found in (often, seldom)
        )
        return [often_s / seldom_s]

    return ratio
