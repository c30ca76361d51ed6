"""Statements of FasterMoE's text on Fig. 10, 11, 12, 13 and Table 3.

Batch sizes are not published. This module assumes 8 sequences of 1,024 tokens per device. The paper recorded
expert selections in real trainings, and did not publish them either. Latencies are those of the MoE layers,
as in the paper (§5.2), except for Table 3. ZeRO is not a strategy of this package. Its stage 3 is computed
from its
volume: parameters are gathered in each pass and gradients are reduced once, without overlap, with even
compute.
"""

from collections.abc import Callable

import numpy as np

from benchmarks.papers.setting import PROFILED, Model, Relation, Setting
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD

MODELS = {  # Table 2
    "MoE-GPT-S": Model(1024, 1024, 12),
    "MoE-GPT": Model(2048, 1024, 12),
    "MoE-BERT-Deep": Model(1024, 1024, 24),
    "MoE-BERT-Wide": Model(1024, 1024, 12),
}
ON_JOHNNY = ("MoE-GPT-S", "MoE-GPT", "MoE-BERT-Deep")
ON_TREVOR = ("MoE-BERT-Wide",)
SHADOWS = {"overlap": False}
SMART = {"smart_schedule": True}
SEQUENCES = 8


def _setting(model: str, sigma: float, leaving_share: float | None = None) -> Setting:
    cluster, devices = ("trevor", 64) if model in ON_TREVOR else ("johnny", 16)
    return Setting(MODELS[model], cluster, sigma, devices, devices, 2, SEQUENCES, leaving_share=leaving_share)


def _faster(models: tuple[str, ...], name: str, keys: dict[str, object]) -> Callable[[float], list[float]]:
    """Largest speed-up of the MoE layers over ``ep``, because the text states "up to"."""

    def speedup(sigma: float) -> list[float]:
        settings = [_setting(model, sigma) for model in models]
        return [max(setting.moe_s("ep") / setting.moe_s(name, **keys) for setting in settings)]

    return speedup


def _over_zero(models: tuple[str, ...]) -> Callable[[float], list[float]]:
    def speedup(sigma: float) -> list[float]:
        settings = [_setting(model, sigma) for model in models]
        return [max(_zero_s(setting) / setting.moe_s("fastermoe", **SMART) for setting in settings)]

    return speedup


def _zero_s(setting: Setting) -> float:
    """Return the seconds of the MoE layers under ZeRO stage 3, from its volume in rings over all devices."""
    job, cluster = setting.job, setting.description
    tokens = job.pairs_per_device
    compute_s = (1 + BACKWARD_PER_FORWARD) * tokens * job.expert_flops_per_token / cluster.expert_flops_per_s
    share = (job.num_devices - 1) / job.num_devices
    layer_bytes = share * job.num_experts * job.expert_bytes
    return job.num_layers * (compute_s + 3 * layer_bytes / cluster.inter_node.bandwidth_bytes_per_s)


def _shadowed(sigma: float) -> list[float]:
    """Mean share of shadowed experts over models, layers and iterations."""
    shares = []
    for model in (*ON_JOHNNY, *ON_TREVOR):
        setting = _setting(model, sigma)
        replicas_IL = setting.run("fastermoe", **SHADOWS).ledger.replicas_IL[PROFILED:]
        shares.append(float(replicas_IL.mean() / (setting.num_devices - 1) / setting.num_experts))
    return [float(np.mean(shares))]


def _smart_per_layer(sigma: float) -> list[float]:
    """Largest speed-up of one layer by the smart schedule."""
    best = 0.0
    for model in (*ON_JOHNNY, *ON_TREVOR):
        plain, smart = (_setting(model, sigma).run("ep", **keys).layers for keys in ({}, SMART))
        best = max(best, float((plain.moe_s() / smart.moe_s()).mean(axis=0).max()))
    return [best]


def _table_3(slow: str, fast: str) -> Callable[[float], list[float]]:
    def ratio(sigma: float) -> list[float]:
        cluster = _setting("MoE-GPT", sigma).description
        share = cluster.inter_node.bandwidth_bytes_per_s / (
            cluster.devices_per_node * cluster.intra_node.bandwidth_bytes_per_s
        )
        seconds = {
            "FastMoE": _setting("MoE-GPT", sigma).iteration_s("ep"),
            "without": _setting("MoE-GPT", sigma).iteration_s("fastermoe", **SMART),
            "with": _setting("MoE-GPT", sigma, share).iteration_s("fastermoe", **SMART),
        }
        return [seconds[slow] / seconds[fast]]

    return ratio


_BOTH = ("fastermoe", {**SHADOWS, **SMART})
RELATIONS = (
    Relation("Fig. 10, §5.4", "over ZeRO stage 3, johnny, at most", 6.63, 6.63, _over_zero(ON_JOHNNY)),
    Relation("Fig. 10, §5.4", "over ZeRO stage 3, trevor, at most", 17.87, 17.87, _over_zero(ON_TREVOR)),
    Relation("Fig. 11, §5.5", "part of the experts that is shadowed", 0.19, 0.19, _shadowed),
    Relation("Fig. 12, §5.5", "smart schedule over none, one layer, at most", 1.42, 1.42, _smart_per_layer),
    Relation(
        "Fig. 13, §5.5", "shadowing, johnny, at most", 1.95, 1.95, _faster(ON_JOHNNY, "fastermoe", SHADOWS)
    ),
    Relation(
        "Fig. 13, §5.5", "shadowing, trevor, at most", 4.74, 4.74, _faster(ON_TREVOR, "fastermoe", SHADOWS)
    ),
    Relation(
        "Fig. 13, §5.5",
        "smart schedule, both clusters, at most",
        1.40,
        1.40,
        _faster((*ON_JOHNNY, *ON_TREVOR), "ep", SMART),
    ),
    Relation("Fig. 13, §5.5", "both, johnny, at most", 2.20, 2.20, _faster(ON_JOHNNY, *_BOTH)),
    Relation("Fig. 13, §5.5", "both, trevor, at most", 5.72, 5.72, _faster(ON_TREVOR, *_BOTH)),
    Relation("Table 3", "iteration of FastMoE over FasterMoE's", 1.32, 1.32, _table_3("FastMoE", "without")),
    Relation(
        "Table 3", "without the topology-aware gate over with it", 1.09, 1.09, _table_3("without", "with")
    ),
    Relation(
        "Table 3",
        "iterations to the same loss, GShard's over FasterMoE's",
        2.38,
        2.38,
        None,
        "needs a training of the model",
    ),
)
