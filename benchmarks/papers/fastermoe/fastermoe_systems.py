"""What FasterMoE compares: models, systems, and their simulated or calculated seconds.

The authors published an artifact beside the paper (github.com/laekov/fastermoe-ae, named in Appendix A). What
comes from it is marked here; ``configs/clusters`` has its links and throughput.

Shape letters: I iterations, L layers.
"""

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.papers.setting import PROFILED, Model, Setting
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.simulation.roofline import roofline_point
from megatron_fssdp.simulation.simulator import StrategyOutcome

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


@dataclass(frozen=True)
class System:
    """A simulated system: a strategy with some of its settings.

    Attributes:
        strategy: Name of the strategy.
        keys: Settings, as pairs of key and value.
    """

    strategy: str
    keys: tuple[tuple[str, object], ...] = ()

    def settings(self, setting: Setting) -> dict[str, object]:
        """Return the strategy's settings. Shadows have no bound, not even memory, as in Alg. 1."""
        bound = {"slots": setting.num_experts} if self.strategy == "fastermoe" else {}
        return {**bound, **dict(self.keys)}

    def run(self, setting: Setting) -> StrategyOutcome:
        """Simulate the system. The result is cached."""
        return setting.run(self.strategy, **self.settings(setting))

    def moe_s(self, setting: Setting) -> float:
        """Return the mean seconds of the MoE layers in an iteration."""
        return setting.moe_s(self.strategy, **self.settings(setting))

    def iteration_s(self, setting: Setting) -> float:
        """Return the mean seconds of an iteration."""
        return setting.iteration_s(self.strategy, **self.settings(setting))


SMART = (("smart_schedule", True), ("group_size", 2))
"""Groups of 2 ranks: the artifact's ``scripts/runme.sh`` has FMOE_FUSE_GRAN=2."""

FASTMOE = System("ep")
SMART_SCHEDULE = System("ep", SMART)


def shadowing(latency: str) -> System:
    """Return shadowing alone. The latency is a value of the setting ``latency``."""
    return System("fastermoe", (("latency", latency), ("overlap", False)))


def both(latency: str) -> System:
    """Return shadowing with the smart schedule. The latency is a value of the setting ``latency``."""
    return System("fastermoe", (("latency", latency), *SMART))


OUTGOING = 0.14 / 2
"""Share of (token, k) pairs that leave a node under the gate.

The authors' gate lets 0.14 of the tokens leave (``fmoe/gates/faster_gate.py`` of github.com/laekov/fastmoe),
each with one of its two choices (``leaving_choices=one``). W_net / (M · W_local) of §4.3 is 0.071 for johnny.
"""


def setting_of(
    model: str, sigma: float, leaving_share: float | None = None, *, times_the_tokens: int = 1
) -> Setting:
    """Return the setting in which the paper trained a model.

    Args:
        model: A key of ``MODELS``.
        sigma: Spread of the loads.
        leaving_share: Share of a device's pairs that may leave the node under the gate. None: no gate.
        times_the_tokens: Factor on the tokens of a GPU, for what depends on them.
    """
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


def speedup(model: str, sigma: float, system: System, *, times_the_tokens: int = 1) -> float:
    """Return FastMoE's seconds in the MoE layers, divided by those of a system."""
    setting = setting_of(model, sigma, times_the_tokens=times_the_tokens)
    return FASTMOE.moe_s(setting) / system.moe_s(setting)


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


def over_zero(model: str, sigma: float, stage: int, system: System, *, times_the_tokens: int = 1) -> float:
    """Return a system's speed-up over a stage of ZeRO."""
    setting = setting_of(model, sigma, times_the_tokens=times_the_tokens)
    return zero_s(setting, stage) / system.moe_s(setting)


def shadowed_share(model: str, sigma: float, system: System) -> float:
    """Return the mean share of a layer's experts that are shadowed, over layers and iterations."""
    setting = setting_of(model, sigma)
    replicas_IL = system.run(setting).of_layers("replicas")[PROFILED:]
    return float(replicas_IL.mean() / (setting.num_devices - 1) / setting.num_experts)


def with_one_shadow(model: str, layer: int, sigma: float, system: System) -> list[float]:
    """Return the speed-ups of a layer in the iterations in which one of its experts is shadowed."""
    setting = replace(setting_of(model, sigma), layer=layer)
    replicas_I = system.run(setting).of_layers("replicas")[:, 0]
    ratio_I = setting.moe_s_I("ep") / setting.moe_s_I(system.strategy, **system.settings(setting))
    return [float(ratio) for ratio in ratio_I[replicas_I == setting.num_devices - 1]]


def of_layers(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Return every layer's speed-up by the smart schedule and its upper bound, in the models of Fig. 12.

    The bound is that of the artifact's ``plotting/fig12.py``: each pass takes at least the longer one of its
    two all-to-alls and its compute.
    """
    found, bounds = [], []
    for model in IN_FIGURE_12:
        plain, smart = (setting_of(model, sigma).run("ep", **dict(keys)) for keys in ((), SMART))
        exchange_IL, plain_IL = plain.of_layers("exchange_s"), plain.of_layers("moe_s")
        compute_IL = (plain_IL - exchange_IL) / (1 + BACKWARD_PER_FORWARD)
        passes = (compute_IL, BACKWARD_PER_FORWARD * compute_IL)
        shortest_IL = sum(np.maximum(exchange_IL / 2, pass_IL) for pass_IL in passes)
        found.append((plain_IL / smart.of_layers("moe_s")).mean(axis=0))
        bounds.append((plain_IL / shortest_IL).mean(axis=0))
    return np.concatenate(found), np.concatenate(bounds)


@dataclass(frozen=True)
class Place:
    """A point of the DDL-Roofline (Fig. 5).

    Attributes:
        ratio: Computation over communication, R_CC (Eq. 3).
        share_of_peak: Mean throughput of a device (Eq. 4) divided by its peak.
    """

    ratio: float
    share_of_peak: float


def data_and_model_parallelism(setting: Setting) -> dict[str, Place]:
    """Return the points of the two parallelisms of Fig. 5 that have no experts on other devices (§3.3).

    Both compute evenly. Data parallelism all-reduces the gradients of all N experts, 2·N·α·H² numbers, one
    after the other or beside the backward pass. Model parallelism all-reduces the vectors of all N·B pairs of
    token and expert twice. A ring sends 2·(N - 1)/N of the reduced bytes over the network (§3.2).

    Args:
        setting: Model, cluster and tokens.
    """
    job, cluster = setting.job, setting.description
    compute_s = job.pairs_per_device * job.expert_flops_per_token / cluster.expert_flops_per_s
    all_s, backward_s = (1 + BACKWARD_PER_FORWARD) * compute_s, BACKWARD_PER_FORWARD * compute_s
    ring = 2 * (job.num_devices - 1) / job.num_devices / cluster.inter_node.bandwidth_bytes_per_s
    gradients_s = ring * job.num_experts * job.expert_bytes
    tokens_s = 2 * ring * job.num_devices * job.pairs_per_device * job.token_bytes
    return {
        "data parallelism": Place(all_s / gradients_s, all_s / (all_s + gradients_s)),
        "data parallelism, overlapped": Place(
            all_s / gradients_s, all_s / (compute_s + max(backward_s, gradients_s))
        ),
        "model parallelism": Place(all_s / tokens_s, all_s / (all_s + tokens_s)),
    }


def place_of(system: System, setting: Setting) -> Place:
    """Return the point of a simulated system."""
    point = roofline_point(system.run(setting), setting.job)
    return Place(point.ratio, point.mean_flops_per_s / setting.description.expert_flops_per_s)
