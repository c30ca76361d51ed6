"""Quantities of Pro-Prophet's tables and text.

Each device processes one sequence. FasterMoE is simulated without its smart schedule, because §VI-A calls
it "coarse-grained and blocked", and with its own Eq. 8 (``latency=paper``). DeepSpeed-MoE is ``ep``;
padded, it drops no token, which is an assumption: the paper states no capacity factor. Fig. 11 has K = 1,
and each layer is simulated on its own. In Fig. 14, "nothing" is ``ep``. In Fig. 15, the top experts are
those of the iteration before. Beside a row, "even loads" is what perfectly even loads would give ``ep``,
and "transfers for nothing" is the simulated system if nothing waited for experts and gradients.

Shape letters: I iterations, L layers, D devices.
"""

from dataclasses import replace

import numpy as np

from benchmarks.papers.claims import claims
from benchmarks.papers.pro_prophet_equations import Bandwidth, mean_difference
from benchmarks.papers.setting import PROFILED, Model, Setting
from benchmarks.papers.systems import TOP_EXPERTS
from megatron_fssdp.planning.loads import balance_ratio
from megatron_fssdp.simulation.simulator import StrategyOutcome

SHAPES = {  # Table III: layers, embedding; hidden is twice the embedding
    "MoE-GPT-S": (12, 512),
    "MoE-GPT-M": (12, 1024),
    "MoE-GPT-L": (12, 2048),
    "MoE-GPT-DS": (24, 512),
    "MoE-GPT-DM": (24, 1024),
}
TABLES = {"Table IV": ("hpnv", 16, 16384), "Table V": ("lpwnv", 8, 4096)}
"""Cluster, GPUs and tokens of an iteration."""

OF_WAITING = ("waiting for spAG", "waiting for spRS")
"""Parts of an iteration in which devices wait for experts or gradients."""

SYSTEMS: dict[str, tuple[str, dict[str, object]]] = {
    "DeepSpeed-MoE": ("ep", {}),
    "FasterMoE": ("fastermoe", {"latency": "paper"}),
    "Pro-Prophet": ("prophet", {}),
    "planner": ("prophet", {"overlap": False}),
}
"""Strategy and settings by name. The planner alone lets its transfers wait for compute (Eq. 6)."""


def setting_of(
    model: str, top_k: int, sigma: float, cluster: str = "hpwnv", devices: int = 16, tokens: int = 16384
) -> Setting:
    """Return the setting in which a model was trained."""
    layers, hidden = SHAPES[model]
    shape = Model(hidden, tokens // devices, layers)
    return Setting(shape, cluster, sigma, devices, devices, top_k, 1, num_iterations=10)


def seconds(setting: Setting, system: str, *, padded: bool = False) -> float:
    """Return the mean seconds of an iteration under a system."""
    name, keys = SYSTEMS[system]
    is_padded = padded and system == "DeepSpeed-MoE"
    return replace(setting, padded=is_padded).iteration_s(name, **keys)


def cell(
    sigma: float, table: str, k: int, model: str, system: str, over: str, *, padded: bool = False
) -> float:
    """Return a system's speed-up over another one in one cell of Table IV or V."""
    setting = setting_of(model, k, sigma, *TABLES[table])
    return seconds(setting, over, padded=padded) / seconds(setting, system)


def even_loads(sigma: float, table: str, k: int, model: str, **_: str) -> float:
    """Return the speed-up over ``ep`` that perfectly even loads would give, without any cost."""
    skewed, even = (setting_of(model, k, spread, *TABLES[table]) for spread in (sigma, 0.0))
    return seconds(skewed, "DeepSpeed-MoE") / seconds(even, "DeepSpeed-MoE")


def without_waiting(sigma: float, table: str, k: int, model: str, system: str, **_: str) -> float:
    """Return a system's speed-up over ``ep`` if no device ever waited for experts or their gradients."""
    setting = setting_of(model, k, sigma, *TABLES[table])
    waiting_s = _waiting_s(setting, system)
    return seconds(setting, "DeepSpeed-MoE") / (seconds(setting, system) - waiting_s)


def _waiting_s(setting: Setting, system: str, **changed: object) -> float:
    name, keys = SYSTEMS[system]
    parts_s = setting.run(name, **keys, **changed).parts_s
    return sum(float(parts_s[part][PROFILED:].mean()) for part in OF_WAITING)


def above_even_loads(sigma: float) -> float:
    """Return the number of cells in which the paper's speed-up exceeds what even loads would give here."""
    cells = [claim for claim in claims() if claim.paper == "pro-prophet" and claim.quantity == "cell"]
    of_ours = [claim for claim in cells if (claim.settings["system"], claim.padded) == ("Pro-Prophet", True)]
    return sum(claim.low > even_loads(sigma, **claim.settings) for claim in of_ours)


def moved_percent(sigma: float, model: str) -> float:
    """Return the percent of FasterMoE's iteration spent waiting for experts or gradients (Table I)."""
    setting, in_turn = setting_of(model, 1, sigma), {"overlap": False}
    name, keys = SYSTEMS["FasterMoE"]
    waiting_s = _waiting_s(setting, "FasterMoE", **in_turn)
    return 100 * waiting_s / setting.iteration_s(name, **keys, **in_turn)


def end_to_end(sigma: float, k: int, over: str, *, padded: bool = False) -> list[float]:
    """Return Pro-Prophet's speed-ups on 16 and 32 GPUs of HPWNV, all models (Fig. 10)."""
    settings = [
        setting_of(model, k, sigma, "hpwnv", devices, 1024 * devices)
        for devices in (16, 32)
        for model in SHAPES
    ]
    return [seconds(setting, over, padded=padded) / seconds(setting, "Pro-Prophet") for setting in settings]


def mean_of_models(sigma: float, k: int, over: str) -> float:
    """Return the mean of :func:`end_to_end`."""
    return float(np.mean(end_to_end(sigma, k, over)))


def one_layer(sigma: float, over: str, *, padded: bool = False) -> list[float]:
    """Return the smallest and largest speed-up of a layer of MoE-GPT-M, simulated on its own (Fig. 11).

    K is not stated and taken as in Fig. 12.
    """
    whole, speedups = setting_of("MoE-GPT-M", 1, sigma), []
    (name, keys), (slow, slow_keys) = SYSTEMS["Pro-Prophet"], SYSTEMS[over]
    for layer in range(whole.model.layers):
        alone = replace(whole, layer=layer)
        slow_s = replace(alone, padded=padded).moe_s(slow, **slow_keys)
        speedups.append(slow_s / alone.moe_s(name, **keys))
    return [min(speedups), max(speedups)]


def faster(sigma: float, k: int, slow: str, fast: str, *, padded: bool = False) -> float:
    """Return the seconds of a system divided by those of another one, MoE-GPT-M (Fig. 12, 14)."""
    setting = setting_of("MoE-GPT-M", k, sigma)
    return seconds(setting, slow, padded=padded) / seconds(setting, fast)


def difference(sigma: float, operation: str, bandwidth: Bandwidth) -> float:
    """Return the mean difference of Eq. 1 to 5 from the simulator, MoE-GPT-M, K = 1 (Fig. 13)."""
    return mean_difference(operation, setting_of("MoE-GPT-M", 1, sigma), bandwidth)


def balance(sigma: float, k: int) -> float:
    """Return the largest ratio of RB to FasterMoE's in a layer of MoE-GPT-M (Fig. 16)."""
    setting = setting_of("MoE-GPT-M", k, sigma)
    plain = setting.run("ep")
    ours, theirs = (_mean_balance_L(plain, setting.run(name)) for name in ("prophet", "fastermoe"))
    return float((ours / theirs).max())


def largest_balance(sigma: float) -> float:
    """Return the larger one of both K."""
    return max(balance(sigma, 1), balance(sigma, 2))


def _mean_balance_L(plain: StrategyOutcome, balanced: StrategyOutcome) -> np.ndarray:
    """Mean of RB over iterations, of each layer: ``[L]`` (§VI-C)."""
    before_ILD, after_ILD = (outcome.tokens_ILD[PROFILED:] for outcome in (plain, balanced))
    ratios = [
        [
            balance_ratio(before_D, after_D) or np.nan
            for before_D, after_D in zip(before_LD, after_LD, strict=True)
        ]
        for before_LD, after_LD in zip(before_ILD, after_ILD, strict=True)
    ]
    return np.nanmean(np.array(ratios), axis=0)


def over_top(sigma: float, k: int, number: int) -> float:
    """Return the planner's speed-up over sending the last iteration's most loaded experts to all (Fig. 15).

    Hecate's Alg. 1 gives this placement if memory is sufficient.
    """
    setting = setting_of("MoE-GPT-M", k, sigma)
    keys: dict[str, object] = {"planner": "hecate", "reshard_interval": 0, "overlap": False}
    top_s = setting.iteration_s(TOP_EXPERTS, slots=number, overlap_degree=number, **keys)
    return top_s / seconds(setting, "planner")
