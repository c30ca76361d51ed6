"""Settings of Pro-Prophet's tables, its published speed-ups, and the simulated ones.

Shape letters: I iterations, L layers, D devices.
"""

from dataclasses import replace

import numpy as np

from benchmarks.papers.described_systems import TOP_EXPERTS
from benchmarks.papers.setting import PROFILED, Model, Setting
from megatron_fssdp.planning.loads import balance_ratio
from megatron_fssdp.simulation.simulator import StrategyOutcome

SHAPES = {  # Table III: layers, embedding; hidden is twice the embedding
    "MoE-GPT-S": (12, 512),
    "MoE-GPT-M": (12, 1024),
    "MoE-GPT-L": (12, 2048),
    "MoE-GPT-DS": (24, 512),
    "MoE-GPT-DM": (24, 1024),
}
TABLE_IV = {  # K, model: FasterMoE's and Pro-Prophet's speed-up over DeepSpeed-MoE; 16 GPUs, 16,384 tokens
    (1, "MoE-GPT-S"): (1.63, 1.98),
    (1, "MoE-GPT-M"): (1.99, 2.22),
    (1, "MoE-GPT-L"): (1.62, 1.80),
    (1, "MoE-GPT-DS"): (1.34, 1.70),
    (1, "MoE-GPT-DM"): (1.68, 2.26),
    (2, "MoE-GPT-S"): (2.31, 2.62),
    (2, "MoE-GPT-M"): (1.82, 2.10),
    (2, "MoE-GPT-L"): (1.94, 2.23),
    (2, "MoE-GPT-DS"): (1.77, 1.94),
    (2, "MoE-GPT-DM"): (1.84, 2.07),
}
TABLE_V = {  # the same; 8 GPUs, 4,096 tokens
    (1, "MoE-GPT-S"): (1.20, 1.30),
    (1, "MoE-GPT-M"): (1.02, 1.18),
    (1, "MoE-GPT-DS"): (1.12, 1.30),
    (1, "MoE-GPT-DM"): (0.96, 1.26),
    (2, "MoE-GPT-S"): (1.56, 1.91),
    (2, "MoE-GPT-M"): (1.29, 1.94),
    (2, "MoE-GPT-DS"): (1.44, 1.64),
    (2, "MoE-GPT-DM"): (1.25, 1.58),
}
TABLE_I = {  # Place and Reduce, percent of an iteration
    "MoE-GPT-S": (11.6, 11.5),
    "MoE-GPT-M": (12.5, 12.5),
    "MoE-GPT-L": (14.2, 17.7),
    "MoE-GPT-DS": (13.8, 13.9),
    "MoE-GPT-DM": (16.1, 14.9),
}
OF_WAITING = ("waiting for spAG", "waiting for spRS")
"""Parts of an iteration in which devices wait for experts or gradients."""

FASTERMOE: tuple[str, dict[str, object]] = ("fastermoe", {"latency": "paper"})
SYSTEMS = {"FasterMoE": FASTERMOE, "Pro-Prophet": ("prophet", {})}

TABLES = {  # table: cluster, GPUs, tokens, cells
    "Table IV, HPNV": ("hpnv", 16, 16384, TABLE_IV),
    "Table V, LPWNV": ("lpwnv", 8, 4096, TABLE_V),
}


def setting_of(model: str, cluster: str, devices: int, tokens: int, top_k: int, sigma: float) -> Setting:
    layers, hidden = SHAPES[model]
    shape = Model(hidden, tokens // devices, layers)
    return Setting(shape, cluster, sigma, devices, devices, top_k, 1, num_iterations=10)


def of_cell(table: str, top_k: int, model: str, sigma: float) -> Setting:
    cluster, devices, tokens, _ = TABLES[table]
    return setting_of(model, cluster, devices, tokens, top_k, sigma)


def speedup(table: str, top_k: int, model: str, sigma: float, system: str, over: str = "") -> float:
    """Return a system's speed-up over another one, or over ``ep``, in one cell."""
    setting = of_cell(table, top_k, model, sigma)
    (name, keys), (slow, slow_keys) = SYSTEMS[system], SYSTEMS.get(over, ("ep", {}))
    return setting.iteration_s(slow, **slow_keys) / setting.iteration_s(name, **keys)


def bound(table: str, top_k: int, model: str, sigma: float) -> float:
    """Return the speed-up over ``ep`` that perfectly even loads would give, without any cost."""
    skewed, even = (of_cell(table, top_k, model, value).iteration_s("ep") for value in (sigma, 0.0))
    return skewed / even


def without_waiting(table: str, top_k: int, model: str, sigma: float, system: str) -> float:
    """Return a system's speed-up over ``ep`` if no device ever waited for experts or their gradients."""
    setting = of_cell(table, top_k, model, sigma)
    name, keys = SYSTEMS[system]
    parts_s = setting.run(name, **keys).parts_s
    waiting_s = sum(float(parts_s[part][PROFILED:].mean()) for part in OF_WAITING)
    return setting.iteration_s("ep") / (setting.iteration_s(name, **keys) - waiting_s)


def mean_balance_L(plain: StrategyOutcome, balanced: StrategyOutcome) -> np.ndarray:
    """Return the mean of RB over iterations, of each layer: ``[L]`` (§VI-C)."""
    before_ILD, after_ILD = (outcome.tokens_ILD[PROFILED:] for outcome in (plain, balanced))
    ratios = [
        [
            balance_ratio(before_D, after_D) or np.nan
            for before_D, after_D in zip(before_LD, after_LD, strict=True)
        ]
        for before_LD, after_LD in zip(before_ILD, after_ILD, strict=True)
    ]
    return np.nanmean(np.array(ratios), axis=0)


def of_layers(top_k: int, over: str, sigma: float) -> list[float]:
    """Return Pro-Prophet's speed-up in each layer of MoE-GPT-M, simulated on its own (Fig. 11).

    Args:
        top_k: Number of experts of a token.
        over: A key of ``SYSTEMS``, or "" for ``ep``.
        sigma: Spread of the loads.
    """
    whole = setting_of("MoE-GPT-M", "hpwnv", 16, 16384, top_k, sigma)
    (name, keys), (slow, slow_keys) = SYSTEMS["Pro-Prophet"], SYSTEMS.get(over, ("ep", {}))
    alone = [replace(whole, layer=layer) for layer in range(whole.model.layers)]
    return [setting.moe_s(slow, **slow_keys) / setting.moe_s(name, **keys) for setting in alone]


IN_TURN: dict[str, object] = {"overlap": False}


def moved_percent(model: str, sigma: float) -> float:
    """Return the percent of FasterMoE's iteration in which devices wait for experts or gradients."""
    setting = setting_of(model, "hpwnv", 16, 16384, 1, sigma)
    name, keys = FASTERMOE
    parts_s = setting.run(name, **keys, **IN_TURN).parts_s
    waiting_s = sum(parts_s[part][PROFILED:].mean() for part in OF_WAITING)
    return 100 * float(waiting_s) / setting.iteration_s(name, **keys, **IN_TURN)


def over_top(top_k: int, number: int, sigma: float) -> float:
    """Return the planner's speed-up over sending the last iteration's most loaded experts to all devices.

    Hecate's Alg. 1 gives this placement if memory is sufficient.

    Args:
        top_k: Number of experts of a token.
        number: Number of experts that are sent.
        sigma: Spread of the loads.
    """
    setting = setting_of("MoE-GPT-M", "hpwnv", 16, 16384, top_k, sigma)
    top = setting.iteration_s(
        TOP_EXPERTS,
        planner="hecate",
        slots=number,
        overlap_degree=number,
        reshard_interval=0,
        overlap=False,
    )
    return top / setting.iteration_s("prophet", **IN_TURN)
