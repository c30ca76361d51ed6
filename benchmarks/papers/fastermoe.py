"""FasterMoE's models and systems, and the quantities of its text on Fig. 10 to 13 and Table 3.

The authors published an artifact beside the paper (github.com/laekov/fastermoe-ae, named in Appendix A). What
comes from it is marked here; ``configs/clusters`` has its links and throughput.

Shape letters: I iterations, L layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.papers.claims import geometric_mean
from benchmarks.papers.setting import PROFILED, Model, Setting
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD

MODELS = {  # Table 2
    "MoE-GPT-S": Model(1024, 1024, 12),
    "MoE-GPT": Model(2048, 1024, 12),
    "MoE-GPT-L": Model(4096, 1024, 12),
    "MoE-BERT-Deep": Model(1024, 1024, 24),
    "MoE-BERT-Deep-L": Model(4096, 1024, 24),
    "MoE-BERT-Wide": Model(1024, 1024, 12),
    "MoE-BERT-Wide-L": Model(2048, 1024, 12),
}
ON_TREVOR = ("MoE-BERT-Wide", "MoE-BERT-Wide-L")
ON_JOHNNY = tuple(name for name in MODELS if name not in ON_TREVOR)
IN_FIGURE_12 = ("MoE-GPT-S", "MoE-GPT-L", "MoE-BERT-Deep", "MoE-BERT-Deep-L")
"""Models of Fig. 12 (the artifact's ``plotting/fig12.py``)."""


ITERATIONS = {"GShard": 30.9, "FastMoE": 12.2, "FasterMoE with its gate": 15.3}
"""Thousands of iterations to the same loss (Table 3)."""


SMART: dict[str, object] = {"smart_schedule": True, "group_size": 2}
"""Groups of 2 ranks: the artifact's ``scripts/runme.sh`` has FMOE_FUSE_GRAN=2."""

OUTGOING = 0.14 / 2
"""Share of (token, k) pairs that leave a node under the gate.

The authors' gate lets 0.14 of the tokens leave (``fmoe/gates/faster_gate.py`` of github.com/laekov/fastmoe),
each with one of its two choices. W_net / (M · W_local) of §4.3 is 0.071 for johnny.
"""


def setting_of(
    model: str, sigma: float, leaving_share: float | None = None, *, times_the_tokens: int = 1
) -> Setting:
    """Return the setting in which the paper trained a model."""
    cluster, devices = ("trevor", 64) if model in ON_TREVOR else ("johnny", 16)
    sequences = times_the_tokens * (1 if "GPT" in model else 2)
    return Setting(
        MODELS[model],
        cluster,
        sigma,
        devices,
        devices,
        2,
        sequences,
        num_iterations=8,
        leaving_share=leaving_share,
        precision="fp32",
    )


def zero_s(setting: Setting, stage: int) -> float:
    """Return the seconds of the MoE layers under a stage of ZeRO, in rings over all devices."""
    job, cluster = setting.job, setting.description
    forward_s = job.pairs_per_device * job.expert_flops_per_token / cluster.expert_flops_per_s
    backward_s = BACKWARD_PER_FORWARD * forward_s
    share = (job.num_devices - 1) / job.num_devices
    moved_s = share * job.num_experts * job.expert_bytes / cluster.inter_node.bandwidth_bytes_per_s
    layer_s = {
        1: forward_s + backward_s + 2 * moved_s,
        2: forward_s + max(backward_s, moved_s) + moved_s,
        3: forward_s + backward_s + 3 * moved_s,
    }
    return job.num_layers * layer_s[stage]


def system_of(setting: Setting, part: str, latency: str = "paper") -> tuple[str, dict[str, object]]:
    """Return the strategy of a simulated system, and its settings.

    Args:
        setting: Model and cluster. Shadows have no bound, not even memory, as in Alg. 1.
        part: ``shadowing``, ``schedule``, ``both`` or ``none``, which is FastMoE.
        latency: Value of the setting ``latency``: the formula that selects shadows.
    """
    shadows: dict[str, object] = {"slots": setting.num_experts, "latency": latency}
    return {
        "none": ("ep", {}),
        "schedule": ("ep", SMART),
        "shadowing": ("fastermoe", {**shadows, "overlap": False}),
        "both": ("fastermoe", {**shadows, **SMART}),
    }[part]


def of_models(
    sigma: float,
    part: str,
    models: Sequence[str] = tuple(MODELS),
    latency: str = "paper",
    tokens: int = 1,
    over: int | None = None,
) -> list[float]:
    """Return each model's speed-up of the MoE layers over FastMoE, or over a stage of ZeRO.

    ``sigma`` is the spread of the loads, and ``part`` that of :func:`system_of`, ``latency`` selects shadows,
    and ``tokens`` is a factor on a GPU's tokens. It is compared with a stage of ZeRO (``over``) or FastMoE.
    """
    speedups = []
    for model in models:
        setting = setting_of(model, sigma, times_the_tokens=tokens)
        strategy, keys = system_of(setting, part, latency)
        slow_s = setting.moe_s("ep") if over is None else zero_s(setting, over)
        speedups.append(slow_s / setting.moe_s(strategy, **keys))
    return speedups


def largest(sigma: float, part: str, cluster: str, **others: Any) -> float:
    """Return the largest speed-up of the models on a cluster, because the text states "up to"."""
    return max(of_models(sigma, part, ON_TREVOR if cluster == "trevor" else ON_JOHNNY, **others))


def mean(sigma: float, part: str) -> float:
    """Return the geometric mean of all models' speed-ups, where the text does not say "up to"."""
    return geometric_mean(of_models(sigma, part))


def shadowed(sigma: float, model: str, latency: str = "paper") -> float:
    """Return the mean share of a layer's experts that are shadowed, over layers and iterations."""
    setting = setting_of(model, sigma)
    strategy, keys = system_of(setting, "shadowing", latency)
    replicas_IL = setting.run(strategy, **keys).of_layers("replicas")[PROFILED:]
    return float(replicas_IL.mean() / (setting.num_devices - 1) / setting.num_experts)


def with_one_shadow(sigma: float, model: str) -> float:
    """Return the largest speed-up of a layer in an iteration in which one of its experts is shadowed."""
    speedups: list[float] = []
    for layer in range(MODELS[model].layers):
        setting = replace(setting_of(model, sigma), layer=layer)
        strategy, keys = system_of(setting, "shadowing")
        replicas_I = setting.run(strategy, **keys).of_layers("replicas")[:, 0]
        ratio_I = setting.moe_s_I("ep") / setting.moe_s_I(strategy, **keys)
        speedups += [float(ratio) for ratio in ratio_I[replicas_I == setting.num_devices - 1]]
    return max(speedups)


def of_layers(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Return every layer's speed-up by the smart schedule and its upper bound, in the models of Fig. 12.

    The bound is that of the artifact's ``plotting/fig12.py``: each pass takes at least the longer one of its
    two all-to-alls and its compute.
    """
    speedups, bounds = [], []
    for model in IN_FIGURE_12:
        plain, smart = (setting_of(model, sigma).run("ep", **keys) for keys in ({}, SMART))
        exchange_IL, plain_IL = plain.of_layers("exchange_s"), plain.of_layers("moe_s")
        compute_IL = (plain_IL - exchange_IL) / (1 + BACKWARD_PER_FORWARD)
        passes = (compute_IL, BACKWARD_PER_FORWARD * compute_IL)
        shortest_IL = sum(np.maximum(exchange_IL / 2, pass_IL) for pass_IL in passes)
        speedups.append((plain_IL / smart.of_layers("moe_s")).mean(axis=0))
        bounds.append((plain_IL / shortest_IL).mean(axis=0))
    return np.concatenate(speedups), np.concatenate(bounds)


def best_layer(sigma: float, kind: str) -> float:
    """Return the largest ``speedup`` or ``bound`` of a layer, or the largest ``part`` of the bound."""
    speedups, bounds = of_layers(sigma)
    return float({"speedup": speedups, "bound": bounds, "part": speedups / bounds}[kind].max())


def iteration_ms(sigma: float, system: str, latency: str = "paper") -> float:
    """Return the milliseconds of an iteration of MoE-GPT under a system of Table 3, or "BASE Layer".

    GShard limits the tokens of every expert, and BASE Layer gives all experts equally many. Both are ``ep``
    with even loads.
    """
    share = OUTGOING if system == "FasterMoE with its gate" else None
    has_even_loads = system in ("GShard", "BASE Layer")
    setting = setting_of("MoE-GPT", 0.0 if has_even_loads else sigma, share)
    strategy, keys = system_of(setting, "both" if system.startswith("FasterMoE") else "none", latency)
    return 1e3 * setting.iteration_s(strategy, **keys)


def of_table_3(sigma: float, slow: str, fast: str, latency: str = "paper") -> float:
    """Return the milliseconds of one system divided by those of another one."""
    return iteration_ms(sigma, slow, latency) / iteration_ms(sigma, fast, latency)


def sooner(sigma: float, slow: str, fast: str, latency: str = "paper") -> float:
    """Return the ratio of times to the same loss, with the paper's numbers of iterations."""
    return of_table_3(sigma, slow, fast, latency) * ITERATIONS[slow] / ITERATIONS[fast]
