"""Statements of FasterMoE's text on Fig. 10 to 13 and Table 3.

The authors published an artifact beside the paper (github.com/laekov/fastermoe-ae, named in Appendix A).
These constants come from it, and ``configs/clusters`` has those of the links and of the throughput:

* Numbers have 4 bytes, as in §3.2 of the paper.
* A device has 1,024 tokens of the GPT models and 2,048 of the BERT models in an iteration
  (``plotting/fig10.py`` reads results of 2,048 and 4,096 pairs of a token and one of its 2 experts). The
  iteration of FastMoE in Table 3, 2,117 ms, agrees with this. The tokens on trevor are not published; those
  of the BERT models are assumed.
* The smart schedule has groups of 2 ranks (``scripts/runme.sh``: ``FMOE_FUSE_GRAN=2``).

The paper recorded expert selections in real trainings. Their skew is in ``skews``. Latencies are those of the
MoE layers, as in the paper (§5.2), except for Table 3. Shadows are selected by the paper's own Eq. 8
(``latency=paper``); rows named "(ours)" use this package's default.

ZeRO and GShard are not strategies of this package. ZeRO is computed from its volume (Rajbhandari et al. 2020,
§7): with p bytes of parameters, stage 3 moves 3p, and stages 1 and 2 move 2p, of which stage 2 hides the
reduction of gradients under the backward pass. Compute is even. GShard limits the tokens of every expert, so
it is ``ep`` with even loads.
"""

from collections.abc import Callable

import numpy as np

from benchmarks.papers.setting import OURS, PROFILED, Model, Relation, Setting
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

LATENCY = {"latency": "paper"}
SMART = {"smart_schedule": True, "group_size": 2}
SHADOWING = ("fastermoe", {**LATENCY, "overlap": False})
SMART_SCHEDULE = ("ep", SMART)
BOTH = ("fastermoe", {**LATENCY, **SMART})

TABLE_3 = {  # milliseconds of an iteration
    "GShard": 1000,
    "FastMoE": 2117,
    "FasterMoE without its gate": 1609,
    "FasterMoE with its gate": 1471,
}
OUTGOING = 0.14 / 2
"""Share of (token, k) pairs that leave a node under the gate.

The authors' gate lets 0.14 of the tokens leave (``fmoe/gates/faster_gate.py`` of github.com/laekov/fastmoe),
each with one of its two choices. W_net / (M · W_local) of §4.3 is 0.071 for johnny.
"""


def _setting(model: str, sigma: float, leaving_share: float | None = None) -> Setting:
    cluster, devices = ("trevor", 64) if model in ON_TREVOR else ("johnny", 16)
    sequences = 1 if "GPT" in model else 2
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


def speedup(model: str, sigma: float, name: str, keys: dict[str, object]) -> float:
    """Return the seconds of the MoE layers under ``ep``, divided by those under a strategy."""
    setting = _setting(model, sigma)
    return setting.moe_s("ep") / setting.moe_s(name, **keys)


def _faster(models: tuple[str, ...], name: str, keys: dict[str, object]) -> Callable[[float], list[float]]:
    """Largest speed-up of the models, because the text states "up to"."""
    return lambda sigma: [max(speedup(model, sigma, name, keys) for model in models)]


def _smart_schedule(sigma: float) -> list[float]:
    """Mean speed-up of the models by the smart schedule. The text does not say "up to" here."""
    found = [speedup(model, sigma, *SMART_SCHEDULE) for model in MODELS]
    return [float(np.exp(np.mean(np.log(found))))]


def zero_s(setting: Setting, stage: int) -> float:
    """Return the seconds of the MoE layers under a stage of ZeRO, in rings over all devices.

    Args:
        setting: Model, cluster and tokens.
        stage: 1, 2 or 3.
    """
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


def over_zero(model: str, sigma: float, stage: int) -> float:
    """Return FasterMoE's speed-up over a stage of ZeRO."""
    setting = _setting(model, sigma)
    name, keys = BOTH
    return zero_s(setting, stage) / setting.moe_s(name, **keys)


def _over_zero(models: tuple[str, ...], stage: int) -> Callable[[float], list[float]]:
    return lambda sigma: [max(over_zero(model, sigma, stage) for model in models)]


def _shadowed(keys: dict[str, object]) -> Callable[[float], list[float]]:
    """Mean share of shadowed experts over models, layers and iterations."""

    def share(sigma: float) -> list[float]:
        shares = []
        for model in MODELS:
            setting = _setting(model, sigma)
            replicas_IL = setting.run("fastermoe", **keys).ledger.replicas_IL[PROFILED:]
            shares.append(float(replicas_IL.mean() / (setting.num_devices - 1) / setting.num_experts))
        return [float(np.mean(shares))]

    return share


def _of_layers(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Speed-up of every layer by the smart schedule, and its upper bound (§5.5), of all models."""
    found, bounds = [], []
    for model in MODELS:
        plain, smart = (_setting(model, sigma).run("ep", **keys).layers for keys in ({}, SMART))
        plain_s, exchange_s = plain.moe_s(), plain.exchange_s()
        found.append((plain_s / smart.moe_s()).mean(axis=0))
        bounds.append((plain_s / np.maximum(exchange_s, plain_s - exchange_s)).mean(axis=0))
    return np.concatenate(found), np.concatenate(bounds)


def iteration_ms(system: str, sigma: float) -> float:
    """Return the milliseconds of an iteration of MoE-GPT under a system of Table 3."""
    name, keys = BOTH if system.startswith("FasterMoE") else ("ep", {})
    share = OUTGOING if system == "FasterMoE with its gate" else None
    setting = _setting("MoE-GPT", 0.0 if system == "GShard" else sigma, share)
    return 1e3 * setting.iteration_s(name, **keys)


def _table_3() -> list[Relation]:
    explained = {
        "FasterMoE without its gate": HIDES_MORE,
        "FasterMoE with its gate": HIDES_MORE,
    }

    def milliseconds(system: str) -> Callable[[float], list[float]]:
        return lambda sigma: [iteration_ms(system, sigma)]

    return [
        Relation(
            "Table 3",
            f"milliseconds of an iteration, {system}",
            value,
            value,
            milliseconds(system),
            explained=explained.get(system, ""),
        )
        for system, value in TABLE_3.items()
    ]


def _of_table_3(slow: str, fast: str) -> Callable[[float], list[float]]:
    return lambda sigma: [iteration_ms(slow, sigma) / iteration_ms(fast, sigma)]


HIDES_MORE = (
    "the simulated smart schedule pays start-ups only, not the smaller GEMMs and slower small messages of "
    "a real one"
)
OF_TREVOR = (
    "open: tokens and skew of the 64 experts are not published, and the description has no PCIe links "
    "between GPUs and NIC"
)
OF_BERT = (
    "MoE-BERT-Deep has the skew of §2.4 here, which is that of one layer of one model; without it the "
    "largest is MoE-GPT-S"
)
ONE_LAYER = "the paper looks at iterations of one layer that it does not name"
WITHOUT, WITH = "FasterMoE without its gate", "FasterMoE with its gate"
RELATIONS = (
    Relation("Fig. 10, §5.4", "over ZeRO stage 3, johnny, at most", 6.63, 6.63, _over_zero(ON_JOHNNY, 3)),
    Relation(
        "Fig. 10, §5.4",
        "over ZeRO stage 3, trevor, at most",
        17.87,
        17.87,
        _over_zero(ON_TREVOR, 3),
        explained=OF_TREVOR,
    ),
    Relation("Fig. 10, §5.4", "over ZeRO stage 2, johnny, at most", 3.94, 3.94, _over_zero(ON_JOHNNY, 2)),
    Relation(
        "Fig. 11, §5.5",
        "part of the experts that is shadowed",
        0.19,
        0.19,
        _shadowed(SHADOWING[1]),
        explained=f"open: {ONE_LAYER}; the largest models shadow nothing here",
    ),
    Relation(
        OURS, "part of the experts that is shadowed (Fig. 11)", 0.19, 0.19, _shadowed({"overlap": False})
    ),
    Relation("Fig. 11, §5.5", "speed-up of an iteration with 1 shadow", 1.97, 1.97, None, ONE_LAYER),
    Relation(
        "Fig. 12, §5.5",
        "bound of the smart schedule's speed-up, one layer, at most",
        1.71,
        1.71,
        lambda sigma: [float(_of_layers(sigma)[1].max())],
        explained="one of the simulated layers has nearly equal communication and compute: the bound is 2",
    ),
    Relation(
        "Fig. 12, §5.5",
        "smart schedule over none, one layer, at most",
        1.42,
        1.42,
        lambda sigma: [float(_of_layers(sigma)[0].max())],
        explained=HIDES_MORE,
    ),
    Relation(
        "Fig. 12, §5.5",
        "part of the bound that is reached, at most",
        0.99,
        0.99,
        lambda sigma: [float(np.divide(*_of_layers(sigma)).max())],
    ),
    Relation("Fig. 13, §5.5", "shadowing, johnny, at most", 1.95, 1.95, _faster(ON_JOHNNY, *SHADOWING)),
    Relation(
        "Fig. 13, §5.5",
        "shadowing, trevor, at most",
        4.74,
        4.74,
        _faster(ON_TREVOR, *SHADOWING),
        explained=OF_TREVOR,
    ),
    Relation("Fig. 13, §5.5", "smart schedule, mean of all models", 1.40, 1.40, _smart_schedule),
    Relation(
        "Fig. 13, §5.5", "both, johnny, at most", 2.20, 2.20, _faster(ON_JOHNNY, *BOTH), explained=OF_BERT
    ),
    Relation(
        "Fig. 13, §5.5", "both, trevor, at most", 5.72, 5.72, _faster(ON_TREVOR, *BOTH), explained=OF_TREVOR
    ),
    Relation(OURS, "both, johnny, at most (Fig. 13)", 2.20, 2.20, _faster(ON_JOHNNY, "fastermoe", SMART)),
    *_table_3(),
    Relation(
        "Table 3",
        "iteration of FastMoE over FasterMoE's",
        1.32,
        1.32,
        _of_table_3("FastMoE", WITHOUT),
        explained=HIDES_MORE,
    ),
    Relation(
        "Table 3", "without the topology-aware gate over with it", 1.09, 1.09, _of_table_3(WITHOUT, WITH)
    ),
    Relation(
        "Table 3",
        "milliseconds of an iteration, BASE Layer",
        2355,
        2355,
        None,
        "another framework (FairSeq) with a matching algorithm, whose time is not published",
    ),
    Relation(
        "Table 3, Fig. 14",
        "iterations to the same loss, GShard's over FasterMoE's",
        2.38,
        2.38,
        None,
        "needs a training of the model",
    ),
)

NOT_REPRODUCED = {
    "Fig. 1 to 3, 6 to 8": "drawings of the method",
    "Fig. 4": "expert selections of the paper's trainings; only their skew in §2.4 is used",
    "Fig. 5": "no numbers in the text; megatron-fssdp roofline draws expert parallelism and the strategies",
    "Fig. 9": "compares predictions with measurements on the clusters (R² 0.987 and 0.967)",
    "Fig. 14": "losses of a training",
}
"""Figures without a row, and why."""
