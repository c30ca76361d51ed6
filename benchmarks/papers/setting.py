"""One model on one described cluster, under loads of one spread, and what is said of it.

Shape letters: I iterations, L layers, D devices, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.loading import validate
from megatron_fssdp.config.run_config import RunConfig
from megatron_fssdp.config.strategy_selection import strategy_settings
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.simulation.job_loads import fitted_loads
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run
from megatron_fssdp.simulation.simulator import StrategyOutcome, simulate

DRIFT = 0.02
"""Standard deviation by which the logarithm of a popularity changes in an iteration: an assumption."""

OF_MOE_LAYERS = ("experts", "all-to-all", "waiting for spAG", "waiting for spRS")
PROFILED = 3
"""Iterations at the start in which strategies still measure; they are not compared."""


@dataclass(frozen=True)
class Model:
    """A paper's model.

    Attributes:
        hidden: Model dim.
        seq_length: Tokens of a sequence.
        layers: All with experts.
        ffn: Over the model dim.
    """

    hidden: int
    seq_length: int
    layers: int
    ffn: int = 2


@dataclass(frozen=True)
class Setting:
    """What a figure or a cell of a table was measured with.

    Attributes:
        model: The model.
        cluster: Name of a description.
        sigma: Spread of the log-normal popularities.
        num_devices: GPUs, all in one expert-parallel group.
        num_experts: Of a layer.
        top_k: Experts of a token.
        sequences: Of a device in an iteration.
        num_iterations: That are simulated.
        leaving_share: Of a source's tokens that the topology-aware gate lets leave; ``None`` without it.
    """

    model: Model
    cluster: str
    sigma: float
    num_devices: int
    num_experts: int
    top_k: int
    sequences: int
    num_iterations: int = 24
    leaving_share: float | None = None

    @property
    def job(self) -> MoeJob:
        """What each device computes."""
        return _job(self)

    @property
    def description(self) -> ClusterDescription:
        """The cluster, with as many nodes as the devices fill."""
        cluster = load_cluster(self.cluster)
        num_nodes = max(1, self.num_devices // cluster.devices_per_node)
        return cluster.model_copy(update={"num_nodes": num_nodes})

    def run(self, name: str, **keys: object) -> StrategyOutcome:
        """A strategy with settings, simulated once."""
        return _run(self, name, tuple(sorted(keys.items())))

    def iteration_s(self, name: str, **keys: object) -> float:
        """Seconds of an iteration, on average, once costs are measured."""
        return float(self.run(name, **keys).iteration_s[PROFILED:].mean())

    def moe_s(self, name: str, **keys: object) -> float:
        """Seconds of the MoE layers in it, on average."""
        parts_s = self.run(name, **keys).parts_s
        return float(sum(parts_s[part][PROFILED:].mean() for part in OF_MOE_LAYERS))


@dataclass(frozen=True)
class Relation:
    """One stated relation; ``low`` and ``high`` are equal where one number is stated.

    Attributes:
        where: Figure or table.
        what: In words.
        low: Smallest stated value.
        high: Largest.
        simulated: Values for a spread; ``None`` where nothing here stands for it.
        why_not: Then the reason.
    """

    where: str
    what: str
    low: float
    high: float
    simulated: Callable[[float], list[float]] | None
    why_not: str = ""


@cache
def _job(setting: Setting) -> MoeJob:
    model, per_node = setting.model, setting.description.devices_per_node
    data = {
        "model": {
            "num_layers": model.layers,
            "hidden_size": model.hidden,
            "ffn_hidden_size": model.ffn * model.hidden,
            "num_attention_heads": model.hidden // 64,
            "seq_length": model.seq_length,
            "num_experts": setting.num_experts,
            "moe_top_k": setting.top_k,
        },
        "data": {"vocab_size": 50257},
        "parallelism": {
            "nproc_per_node": min(per_node, setting.num_devices),
            "num_nodes": max(1, setting.num_devices // per_node),
            "expert": setting.num_devices,
            "overlap_grad_reduce": True,
        },
        "training": {
            "iterations": 1,
            "micro_batch_size": setting.sequences,
            "global_batch_size": setting.sequences * setting.num_devices,
            "precision": "fp16",
        },
    }
    return job_of_run(validate(RunConfig, data, setting.cluster))


@cache
def _loads(num_layers: int, num_devices: int, num_experts: int, iterations: int, sigma: float) -> np.ndarray:
    """Drawn tokens by log-normal popularities that do a random walk: [I, L, D, E]."""
    rng = np.random.default_rng(0)
    popularity_LE = sigma * rng.normal(size=(num_layers, num_experts))
    drawn = []
    for _ in range(iterations):
        popularity_LE = popularity_LE + DRIFT * rng.normal(size=popularity_LE.shape)
        share_LE = np.exp(popularity_LE)
        share_LE /= share_LE.sum(axis=1, keepdims=True)
        drawn.append([rng.multinomial(16384, share_E, size=num_devices) for share_E in share_LE])
    return np.array(drawn, np.int32)


@cache
def _run(setting: Setting, name: str, keys: tuple[tuple[str, object], ...]) -> StrategyOutcome:
    job = setting.job
    recorded = _loads(job.num_layers, job.num_devices, job.num_experts, setting.num_iterations, setting.sigma)
    counts, _ = fitted_loads(recorded, job)
    if setting.leaving_share is not None:
        topology = Topology.uniform(job.num_devices, job.num_devices // setting.description.devices_per_node)
        counts = kept_in_nodes(counts, topology, setting.leaving_share)
    return simulate(name, strategy_settings(name, dict(keys), name), counts, setting.description, job)


def kept_in_nodes(counts_ILDE: np.ndarray, topology: Topology, leaving_share: float) -> np.ndarray:
    """Loads as the topology-aware gate would leave them (FasterMoE, §4.3), roughly.

    What exceeds a source's allowance stays, spread over its node's experts by their own shares. Who
    would have gone is not known without the scores.

    Args:
        counts_ILDE: Loads of a stock gate.
        topology: Nodes; owners are even.
        leaving_share: Of every source's pairs that may leave.
    """
    num_devices, num_experts = counts_ILDE.shape[2:]
    node_D = np.asarray(topology.node_of_device)
    is_near_DE = node_D[:, None] == node_D[np.arange(num_experts) * num_devices // num_experts]
    far = np.where(is_near_DE, 0, counts_ILDE).astype(float)
    near = np.where(is_near_DE, counts_ILDE, 0).astype(float)
    leaving, allowed = (
        far.sum(axis=-1, keepdims=True),
        leaving_share * counts_ILDE.sum(axis=-1, keepdims=True),
    )
    factor = np.minimum(1.0, allowed / np.maximum(leaving, 1e-9))
    staying = near.sum(axis=-1, keepdims=True)
    spread = np.where(
        staying > 0, near / np.maximum(staying, 1e-9), is_near_DE / is_near_DE.sum(axis=1)[:, None]
    )
    return np.rint(far * factor + near + (1 - factor) * leaving * spread).astype(np.int32)
