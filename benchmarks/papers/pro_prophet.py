"""Pro-Prophet's Tables IV and V cell by cell, and the statements of its text on Fig. 10, 14, 15 and 16.

The paper publishes the tokens of an iteration. Here each device processes one sequence. Expert selections are
not published. DeepSpeed-MoE is simulated as ``ep``. Its capacity factor is not stated and not simulated.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.papers.setting import PROFILED, Model, Relation, Setting
from megatron_fssdp.planning.loads.load_statistics import balance_ratio
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
# FasterMoE with all of its techniques, and Pro-Prophet.
SYSTEMS = {"FasterMoE": ("fastermoe", {"smart_schedule": True}), "Pro-Prophet": ("prophet", {})}


def _setting(model: str, cluster: str, devices: int, tokens: int, top_k: int, sigma: float) -> Setting:
    layers, hidden = SHAPES[model]
    return Setting(Model(hidden, tokens // devices, layers), cluster, sigma, devices, devices, top_k, 1)


def _speedup(
    sigma: float, model: str, cluster: str, devices: int, tokens: int, top_k: int, system: str
) -> list[float]:
    setting = _setting(model, cluster, devices, tokens, top_k, sigma)
    name, keys = SYSTEMS[system]
    return [setting.iteration_s("ep") / setting.iteration_s(name, **keys)]


def _cells(
    table: str, cluster: str, devices: int, tokens: int, cells: dict[tuple[int, str], tuple[float, float]]
) -> list[Relation]:
    return [
        Relation(
            table,
            f"{system} over DeepSpeed-MoE, K = {top_k}, {model}",
            value,
            value,
            partial(
                _speedup,
                model=model,
                cluster=cluster,
                devices=devices,
                tokens=tokens,
                top_k=top_k,
                system=system,
            ),
        )
        for (top_k, model), values in cells.items()
        for system, value in zip(SYSTEMS, values, strict=True)
    ]


def _end_to_end(top_k: int, over: str) -> Callable[[float], list[float]]:
    """Pro-Prophet's speed-ups on 16 and 32 GPUs of HPWNV, all models (Fig. 10)."""

    def speedups(sigma: float) -> list[float]:
        found = []
        for devices, tokens in ((16, 16384), (32, 32768)):
            for model in SHAPES:
                setting = _setting(model, "hpwnv", devices, tokens, top_k, sigma)
                name, keys = SYSTEMS.get(over, ("ep", {}))
                found.append(setting.iteration_s(name, **keys) / setting.iteration_s("prophet"))
        return found

    return speedups


def _component(
    top_k: int, slow: dict[str, object] | None, fast: dict[str, object]
) -> Callable[[float], list[float]]:
    """Seconds of MoE-GPT-M without a component divided by those with it (Fig. 14)."""

    def ratio(sigma: float) -> list[float]:
        setting = _setting("MoE-GPT-M", "hpwnv", 16, 16384, top_k, sigma)
        without = setting.iteration_s("ep") if slow is None else setting.iteration_s("prophet", **slow)
        return [without / setting.iteration_s("prophet", **fast)]

    return ratio


def _over_top(top_k: int, number: int) -> Callable[[float], list[float]]:
    """Speed-up of the planner over sending the last iteration's most loaded experts to all devices.

    Hecate's Alg. 1 gives this placement if memory is sufficient.
    """

    def ratio(sigma: float) -> list[float]:
        setting = _setting("MoE-GPT-M", "hpwnv", 16, 16384, top_k, sigma)
        top = setting.iteration_s(
            "fssdp",
            planner="hecate",
            slots=number,
            overlap_degree=number,
            window=1,
            reshard_interval=0,
            overlap=False,
        )
        return [top / setting.iteration_s("prophet", **IN_TURN)]

    return ratio


def _ratio_of_balance(top_k: int) -> Callable[[float], list[float]]:
    """RB of Pro-Prophet divided by FasterMoE's, in the layer of MoE-GPT-M with the largest ratio (Fig.

    16).
    """

    def ratio(sigma: float) -> list[float]:
        setting = _setting("MoE-GPT-M", "hpwnv", 16, 16384, top_k, sigma)
        plain = setting.run("ep")
        ours, theirs = (_mean_balance_L(plain, setting.run(name)) for name in ("prophet", "fastermoe"))
        return [float((ours / theirs).max())]

    return ratio


def _mean_balance_L(plain: StrategyOutcome, balanced: StrategyOutcome) -> np.ndarray:
    before_ILD, after_ILD = (outcome.ledger.tokens_ILD[PROFILED:] for outcome in (plain, balanced))
    ratios = [
        [
            balance_ratio(before_D, after_D) or np.nan
            for before_D, after_D in zip(before_LD, after_LD, strict=True)
        ]
        for before_LD, after_LD in zip(before_ILD, after_ILD, strict=True)
    ]
    return np.nanmean(np.array(ratios), axis=0)


IN_TURN: dict[str, object] = {"overlap": False}
RELATIONS = (
    Relation("Fig. 10a, b", "Pro-Prophet over DeepSpeed-MoE, HPWNV, K = 1", 1.47, 2.66, _end_to_end(1, "")),
    Relation(
        "Fig. 10a, b", "Pro-Prophet over FasterMoE, HPWNV, K = 1", 1.01, 1.31, _end_to_end(1, "FasterMoE")
    ),
    Relation("Fig. 10c, d", "Pro-Prophet over DeepSpeed-MoE, HPWNV, K = 2", 1.36, 2.37, _end_to_end(2, "")),
    Relation(
        "Fig. 10c, d", "Pro-Prophet over FasterMoE, HPWNV, K = 2", 1.05, 1.48, _end_to_end(2, "FasterMoE")
    ),
    *_cells("Table IV, HPNV", "hpnv", 16, 16384, TABLE_IV),
    *_cells("Table V, LPWNV", "lpwnv", 8, 4096, TABLE_V),
    Relation("Fig. 14", "planner over nothing, K = 1", 1.26, 1.26, _component(1, None, IN_TURN)),
    Relation("Fig. 14", "planner over nothing, K = 2", 1.12, 1.12, _component(2, None, IN_TURN)),
    Relation("Fig. 14", "scheduler with Eq. 8 over planner, K = 1", 1.17, 1.17, _component(1, IN_TURN, {})),
    Relation("Fig. 14", "scheduler with Eq. 8 over planner, K = 2", 1.03, 1.03, _component(2, IN_TURN, {})),
    Relation(
        "Fig. 16",
        "RB over FasterMoE's, layers of MoE-GPT-M, K = 1, at most",
        11.01,
        11.01,
        _ratio_of_balance(1),
    ),
    Relation(
        "Fig. 16",
        "RB over FasterMoE's, layers of MoE-GPT-M, K = 2, at most",
        11.01,
        11.01,
        _ratio_of_balance(2),
    ),
    Relation("Fig. 15a", "planner over sending the top 2 experts to all, K = 1", 1.77, 1.82, _over_top(1, 2)),
    Relation("Fig. 15a", "planner over sending the top 3 experts to all, K = 1", 2.04, 2.10, _over_top(1, 3)),
    Relation("Fig. 15b", "planner over sending the top 2 experts to all, K = 2", 1.38, 1.40, _over_top(2, 2)),
    Relation("Fig. 15b", "planner over sending the top 3 experts to all, K = 2", 1.38, 1.40, _over_top(2, 3)),
)
