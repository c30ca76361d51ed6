"""Quantities of Hecate's text (Fig. 9 to 15). Every function takes the spread of the loads first."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.papers.claims import geometric_mean
from benchmarks.papers.hecate_systems import (
    BASELINES,
    EP,
    FLOPS_PER_S,
    HECATE,
    LONGER,
    MODELS,
    REMATERIALIZED,
    SETTLED,
    SYSTEMS,
    System,
    over_best,
    over_ep,
    setting_of,
)
from benchmarks.papers.setting import OF_MOE_LAYERS, Setting
from benchmarks.papers.systems import STEPPED_HECATE

PLACES = (("hecate-a", 16), ("hecate-a", 32), ("hecate-b", 32))
"""Clusters and numbers of GPUs of Fig. 9 and 10."""

IMPLIED_SHARE = (1 - 1 / 1.70) / (1 - 1 / 11.87)
"""Largest share of EP's iteration in MoE layers that the paper's numbers allow, GPT-MoE-S on cluster B: 0.45.

The layers are 11.87 times as fast (Fig. 11) and the iteration is at most 1.70 times as fast (Fig. 10).
"""

COMPARED = ("GPT-MoE-S", "BERT-MoE")
"""Models with which single causes are varied."""

UNFUSED = ("EP", "SmartMoE", "FlexMoE", "Hecate")
"""Systems of Fig. 12 whose all-to-all has a bar. FasterMoE's is part of one fused kernel."""

Pairs = list[tuple[float, float]]


def of_models(
    sigma: float, cluster: str, devices: int, system: str = "Hecate", **keys: object
) -> list[float]:
    """Return the speed-up of a system, with other values of some settings, over EP for each model."""
    chosen = SYSTEMS[system].having(**keys)
    return [over_ep(setting_of(model, cluster, sigma, devices), chosen) for model in MODELS]


def even_loads(sigma: float, cluster: str, devices: int = 32) -> list[float]:
    """Return what EP would gain from perfectly even loads, for each model."""
    settings = [[setting_of(model, cluster, spread, devices) for spread in (sigma, 0.0)] for model in MODELS]
    return [EP.seconds(skewed) / EP.seconds(even) for skewed, even in settings]


def slowdown(sigma: float, *, padded: bool = False) -> float:
    """Return the largest seconds of EP on cluster A, divided by those with even loads."""
    slowdowns = []
    for model in MODELS:
        setting = setting_of(model, "hecate-a", sigma)
        even_s = EP.seconds(setting_of(model, "hecate-a", 0.0))
        slowdowns.append(EP.seconds(replace(setting, padded=padded)) / even_s)
    return max(slowdowns)


def _moe_s(setting: Setting, system: System) -> float:
    return float(setting.moe_s_I(system.strategy, **system.keys)[SETTLED:].mean())


def share_of_moe(sigma: float) -> float:
    """Return the share of EP's iteration in the MoE layers, GPT-MoE-S on cluster B."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    return _moe_s(setting, EP) / EP.seconds(setting)


def with_share_of_moe(sigma: float, cluster: str, devices: int) -> list[float]:
    """Return Hecate over EP for each model, if MoE layers took :data:`IMPLIED_SHARE` of EP's iteration."""
    settings = [setting_of(model, cluster, sigma, devices) for model in MODELS]
    gains = [_moe_s(setting, EP) / _moe_s(setting, HECATE) for setting in settings]
    return [1 / (1 - IMPLIED_SHARE + IMPLIED_SHARE / gain) for gain in gains]


def times_longer(sigma: float) -> float:
    """Return the factor on compute outside the MoE layers with which these take :data:`IMPLIED_SHARE`."""
    share = share_of_moe(sigma)
    return share / (1 - share) * (1 - IMPLIED_SHARE) / IMPLIED_SHARE


def hidden_experts(setting: Setting) -> int:
    """Return Hecate's overlap degree t (§4.2) with the assumed compute and the nominal bandwidth."""
    job, cluster = setting.job, setting.description
    seconds = min(job.before_gate_flops_L) / cluster.non_expert_flops_per_s
    return int(seconds * cluster.inter_node.bandwidth_bytes_per_s / job.expert_bytes)


def changed_gains(
    sigma: float,
    cluster: str,
    devices: int,
    *,
    draws: int = 1,
    spread: float | None = None,
    experts: int | None = None,
    degree: int | str | None = None,
    longer: bool = False,
) -> list[float]:
    """Return Hecate's speed-ups over EP for every draw and model, with one assumption changed.

    Args:
        sigma: The paper's spread of the loads.
        cluster: Name of the cluster's description.
        devices: Number of GPUs.
        draws: Number of draws of the loads.
        spread: Another spread of the loads.
        experts: Number of experts of a layer. None: twice the number of GPUs, as in the paper.
        degree: Number of replicated experts t, or ``growing``: §4.2's on 32 GPUs, half of it on 16. None:
            §4.2's.
        longer: Whether compute outside the MoE layers takes so long that they take :data:`IMPLIED_SHARE` of
            EP's iteration in the model and on the cluster that this share is from.
    """
    spread, pace = spread or sigma, FLOPS_PER_S[cluster]
    slower = LONGER * (times_longer(spread) if longer else 1.0)
    changed = {"num_experts": experts or 2 * devices, "flops_per_s": (pace, pace / slower)}
    speedups = []
    for draw in range(draws):
        for model in MODELS:
            setting = setting_of(model, cluster, spread, devices, draw=draw, **changed)
            chosen = hidden_experts(setting) * devices // 32 if degree == "growing" else degree
            limits = {} if chosen is None else {"overlap_degree": chosen}
            speedups.append(over_ep(setting, HECATE.having(**limits)))
    return speedups


def more_gpus(sigma: float, **change: Any) -> Pairs:
    """Return the speed-ups on 32 GPUs of cluster A beside those on 16."""
    on_32, on_16 = (changed_gains(sigma, "hecate-a", devices, **change) for devices in (32, 16))
    return list(zip(on_32, on_16, strict=True))


def slower_links(sigma: float, **change: Any) -> Pairs:
    """Return the speed-ups on cluster A beside those on cluster B, 32 GPUs."""
    on_a, on_b = (changed_gains(sigma, cluster, 32, **change) for cluster in ("hecate-a", "hecate-b"))
    return list(zip(on_a, on_b, strict=True))


def baseline_over_ep(sigma: float, system: str) -> list[float]:
    """Return the smallest and largest speed-up of a baseline over EP on 16 and 32 GPUs of cluster A."""
    speedups = [value for devices in (16, 32) for value in of_models(sigma, "hecate-a", devices, system)]
    return [min(speedups), max(speedups)]


def over_best_of_models(sigma: float, devices: int) -> float:
    """Return the mean over models on cluster A: seconds of the fastest baseline divided by Hecate's."""
    return over_best([setting_of(model, "hecate-a", sigma, devices) for model in MODELS])


def over_best_with(
    sigma: float,
    ours: Mapping[str, object] | None = None,
    baselines: Mapping[str, Mapping[str, object]] | None = None,
    without: Collection[str] = (),
    stepped: bool = False,
    spread: float | None = None,
    **others: object,
) -> list[float]:
    """Return Hecate over the best baseline on 16 and 32 GPUs of cluster A, after a change.

    ``ours`` and ``baselines`` change settings, ``without`` leaves baselines out. If ``stepped``, Hecate has
    FasterMoE's schedule. ``spread`` replaces the spread ``sigma`` of the loads. ``others`` change the
    setting; a throughput named as a cluster is that of the experts.
    """
    hecate = (replace(HECATE, strategy=STEPPED_HECATE) if stepped else HECATE).having(**(ours or {}))
    changed = {
        name: system.having(**(baselines or {}).get(name, {}))
        for name, system in BASELINES.items()
        if name not in without
    }
    if "paced_as" in others:
        others["flops_per_s"] = (FLOPS_PER_S[str(others.pop("paced_as"))],) * 2
    return [
        over_best(
            [setting_of(model, "hecate-a", spread or sigma, devices, **others) for model in COMPARED],
            hecate,
            changed,
        )
        for devices in (16, 32)
    ]


def _over_baselines(sigma: float, cluster: str, devices: int) -> list[float]:
    ours = of_models(sigma, cluster, devices)
    theirs = [of_models(sigma, cluster, devices, name) for name in BASELINES]
    return [speedup / baseline for values in theirs for speedup, baseline in zip(ours, values, strict=True)]


def over_baselines(sigma: float) -> float:
    """Return the mean over models and baselines on cluster B: seconds of the baseline divided by Hecate's."""
    return geometric_mean(_over_baselines(sigma, "hecate-b", 32))


def largest(sigma: float) -> float:
    """Return the largest speed-up over a baseline in Fig. 9 and 10."""
    return max(value for place in PLACES for value in _over_baselines(sigma, *place))


def largest_over_ep(sigma: float, system: str, **keys: Any) -> float:
    """Return the largest speed-up of a system over EP in the settings of Fig. 9 and 10."""
    return max(value for place in PLACES for value in of_models(sigma, *place, system, **keys))


def rematerialized_over_baselines(sigma: float) -> list[float]:
    """Return the seconds of each baseline divided by those of Hecate-RM, BERT-MoE-Deep on cluster B."""
    setting = setting_of("BERT-MoE-Deep", "hecate-b", sigma)
    return [baseline.seconds(setting) / REMATERIALIZED.seconds(setting) for baseline in BASELINES.values()]


def layers(sigma: float, *, padded: bool = False) -> list[float]:
    """Return the speed-up of each MoE layer over EP, without other compute, in ascending order."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    plain = EP.outcome(replace(setting, padded=padded)).of_layers("moe_s")
    ours = HECATE.outcome(setting).of_layers("moe_s")
    return sorted((plain.mean(axis=0) / ours.mean(axis=0)).tolist())


def mean_of_layers(sigma: float, *, padded: bool = False) -> float:
    """Return the geometric mean of the speed-ups of the layers."""
    return geometric_mean(layers(sigma, padded=padded))


def all_to_all(sigma: float, *, padded: bool = False) -> float:
    """Return the seconds of EP's all-to-alls divided by Hecate's, BERT-MoE-Deep on cluster B."""
    setting = setting_of("BERT-MoE-Deep", "hecate-b", sigma)
    plain, ours = EP.outcome(replace(setting, padded=padded)), HECATE.outcome(setting)
    return float(plain.parts_s["all-to-all"].mean() / ours.parts_s["all-to-all"].mean())


def collectives(sigma: float) -> float:
    """Return the seconds of Hecate-RM's sparse collectives divided by Hecate's, hidden ones included."""
    setting = setting_of("BERT-MoE-Deep", "hecate-b", sigma)
    again, once = (
        sum(
            end - begin
            for lane, name, begin, end in system.outcome(setting).spans(-1)
            if lane == "transfer" and name.startswith("sp")
        )
        for system in (REMATERIALIZED, HECATE)
    )
    return again / once


def parameters(sigma: float) -> float:
    """Return Hecate's parameters on a device divided by EP's, GPT-MoE-S on cluster B."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    plain, ours = (system.outcome(setting).memory.experts for system in (EP, HECATE))
    return (ours.slot_parameters_bytes + ours.replica_parameters_bytes) / plain.slot_parameters_bytes


def _held_bytes(setting: Setting, system: str) -> float:
    """Optimizer states, gradients and parameters, which the paper counts, without buffers of transfers."""
    experts = SYSTEMS[system].outcome(setting).memory.experts
    return float(experts.total_bytes - experts.transfer_buffers_bytes)


def memory(sigma: float, system: str, over: str = "EP") -> float:
    """Return the memory of the experts divided by another system's, GPT-MoE-S on cluster B."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    held_bytes = _held_bytes(setting, system)
    if over == "EP":
        return held_bytes / EP.outcome(setting).memory.experts.expert_parallelism_bytes
    return held_bytes / _held_bytes(setting, over)


def saved_by_rematerialization(sigma: float) -> float:
    """Return the share of the replicas' parameters that re-materialization saves, GPT-MoE-S on cluster B."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    kept, released = (
        system.outcome(setting).memory.experts.replica_parameters_bytes for system in (HECATE, REMATERIALIZED)
    )
    return 1 - released / kept


def slower_with_rematerialization(sigma: float) -> list[float]:
    """Return the seconds of Hecate-RM divided by Hecate's at 2 and 4 sequences, GPT-MoE-S on cluster B."""
    settings = [setting_of("GPT-MoE-S", "hecate-b", sigma, sequences=sequences) for sequences in (2, 4)]
    return [REMATERIALIZED.seconds(setting) / HECATE.seconds(setting) for setting in settings]


def intervals(sigma: float) -> list[float]:
    """Return the speed-up over EP of sharding alone at intervals of 10 to 100 iterations, with all moves."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma, num_iterations=200)
    alone = HECATE.having(slots=0, overlap_degree=0)
    plain_s = EP.outcome(setting).iteration_s[100:].mean()
    return [
        float(plain_s / alone.having(reshard_interval=every).outcome(setting).iteration_s[100:].mean())
        for every in (10, 25, 50, 100)
    ]


def both_over(sigma: float, **keys: object) -> float:
    """Return the seconds with one component of Hecate divided by those with both, GPT-MoE-S on cluster B."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    return HECATE.having(**keys).seconds(setting) / HECATE.seconds(setting)


def intervals_of_smartmoe(sigma: float, *, with_moves: bool) -> float:
    """Return the MoE layers' seconds with exchanges every 10 iterations, over those with 25, cluster A."""
    setting = setting_of("GPT-MoE-S", "hecate-a", sigma, num_iterations=100)
    parts = (*OF_MOE_LAYERS, *(("re-sharding",) if with_moves else ()))
    often, seldom = (
        BASELINES["SmartMoE"].having(reshard_interval=every).outcome(setting).parts_s for every in (10, 25)
    )
    often_s, seldom_s = (
        float(np.sum([seconds[part][50:].mean() for part in parts])) for seconds in (often, seldom)
    )
    return often_s / seldom_s


def fastest(sigma: float) -> Pairs:
    """Return the seconds of the fastest baseline beside Hecate's, in all models and places."""
    return [
        (min(system.seconds(setting) for system in BASELINES.values()), HECATE.seconds(setting))
        for setting in _settings(sigma)
    ]


def slower_than_ep(sigma: float) -> Pairs:
    """Return the seconds of each baseline beside EP's, in all models and places."""
    return [
        (system.seconds(setting), EP.seconds(setting))
        for setting in _settings(sigma)
        for system in BASELINES.values()
    ]


def _settings(sigma: float) -> list[Setting]:
    return [setting_of(model, cluster, sigma, devices) for cluster, devices in PLACES for model in MODELS]


def _all_to_alls_s(sigma: float) -> dict[str, tuple[float, float]]:
    """By system, the seconds of all-to-alls and of the rest of the MoE layers, BERT-MoE-Deep, cluster B."""
    setting, by_system = setting_of("BERT-MoE-Deep", "hecate-b", sigma), {}
    for name in UNFUSED:
        of_part = SYSTEMS[name].outcome(setting).parts_s
        seconds = {part: float(of_part[part][SETTLED:].mean()) for part in OF_MOE_LAYERS}
        exchange_s = seconds.pop("all-to-all")
        by_system[name] = (exchange_s, sum(seconds.values()))
    return by_system


def all_to_all_dominates(sigma: float) -> Pairs:
    """Return the seconds of all-to-alls beside those of the rest of the MoE layers."""
    return list(_all_to_alls_s(sigma).values())


def least_all_to_all(sigma: float) -> Pairs:
    """Return the other systems' seconds of all-to-alls beside Hecate's."""
    by_system = {name: exchange_s for name, (exchange_s, _) in _all_to_alls_s(sigma).items()}
    return [(exchange_s, by_system["Hecate"]) for name, exchange_s in by_system.items() if name != "Hecate"]


def less_memory(sigma: float) -> Pairs:
    """Return the experts' bytes of FlexMoE, Hecate, Hecate-RM and SmartMoE, each beside the next one's."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    return list(
        pairwise(_held_bytes(setting, name) for name in ("FlexMoE", "Hecate", "Hecate-RM", "SmartMoE"))
    )
