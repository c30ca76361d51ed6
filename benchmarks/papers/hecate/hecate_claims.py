"""Statements of Hecate's text that say what is faster or larger, without a number."""

from itertools import pairwise

from benchmarks.papers.claims import Claim, Pairs
from benchmarks.papers.hecate.hecate_runs import (
    BASELINES,
    EP,
    HECATE,
    MODELS,
    REMATERIALIZED,
    SETTLED,
    System,
    setting_of,
)
from benchmarks.papers.hecate.hecate_trends import TRENDS
from benchmarks.papers.setting import OF_MOE_LAYERS, Setting

PLACES = (("hecate-a", 16), ("hecate-a", 32), ("hecate-b", 32))
UNFUSED = {"EP": EP, "SmartMoE": BASELINES["SmartMoE"], "FlexMoE": BASELINES["FlexMoE"], "Hecate": HECATE}
"""Systems of Fig. 12 whose all-to-all has a bar. FasterMoE's is part of one fused kernel."""


def _settings(sigma: float) -> list[Setting]:
    return [setting_of(model, cluster, sigma, devices) for cluster, devices in PLACES for model in MODELS]


def _fastest(sigma: float) -> Pairs:
    return [
        (min(one.seconds(it) for one in BASELINES.values()), HECATE.seconds(it)) for it in _settings(sigma)
    ]


def _slower_than_ep(sigma: float) -> Pairs:
    return [(one.seconds(it), EP.seconds(it)) for it in _settings(sigma) for one in BASELINES.values()]


def _all_to_all_s(setting: Setting, system: System) -> float:
    return float(system.outcome(setting).parts_s["all-to-all"][SETTLED:].mean())


def _all_to_all_dominates(sigma: float) -> Pairs:
    setting = setting_of("BERT-MoE-Deep", "hecate-b", sigma)
    found = []
    for system in UNFUSED.values():
        parts_s = system.outcome(setting).parts_s
        others_s = sum(
            float(parts_s[part][SETTLED:].mean()) for part in OF_MOE_LAYERS if part != "all-to-all"
        )
        found.append((_all_to_all_s(setting, system), others_s))
    return found


def _least_all_to_all(sigma: float) -> Pairs:
    setting = setting_of("BERT-MoE-Deep", "hecate-b", sigma)
    ours_s = _all_to_all_s(setting, HECATE)
    return [(_all_to_all_s(setting, system), ours_s) for system in UNFUSED.values() if system is not HECATE]


def _memory(sigma: float) -> Pairs:
    """Experts' bytes, without buffers of transfers: each system beside the next smaller one."""
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma)
    held = []
    for system in (BASELINES["FlexMoE"], HECATE, REMATERIALIZED, BASELINES["SmartMoE"]):
        experts = system.outcome(setting).memory.experts
        held.append(float(experts.total_bytes - experts.transfer_buffers_bytes))
    return list(pairwise(held))


CLAIMS = (
    Claim("§5.2", "Hecate is faster than every baseline (4 models; 16 and 32 GPUs of A, 32 of B)", _fastest),
    *TRENDS,
    Claim(
        "§5.2",
        "a baseline is sometimes slower than EP (4 models, 3 places, 3 baselines)",
        _slower_than_ep,
        "Simulated baselines pay only for their traffic and their imbalance; what else slows them in the "
        "paper is not in the text",
    ),
    Claim(
        "§5.3",
        "all-to-alls take more time than the rest of the MoE layers (EP, SmartMoE, FlexMoE, Hecate)",
        _all_to_all_dominates,
    ),
    Claim("§5.3", "Hecate's all-to-alls take the least time (beside the same systems)", _least_all_to_all),
    Claim("§5.3", "memory: FlexMoE, Hecate, Hecate-RM, SmartMoE, in descending order", _memory),
)
