"""Simulated settings: one model on one cluster with loads of one spread.

Shape letters: I iterations, L layers, D devices, E experts.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.papers.systems import described_systems
from megatron_fssdp.config.cluster_description import ClusterDescription, load_cluster
from megatron_fssdp.config.loading import validate
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import strategy_settings
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run
from megatron_fssdp.simulation.simulator import StrategyOutcome, simulate
from megatron_fssdp.simulation.workloads import fitted_loads

DRIFT = 0.02
"""Assumed standard deviation of the change of a popularity's logarithm in one iteration."""

OF_MOE_LAYERS = ("experts", "all-to-all", "waiting for spAG", "waiting for spRS")
"""Parts of an iteration in which MoE layers run."""

PROFILED = 3
"""Number of iterations at the start in which strategies still measure. They are not compared."""


@dataclass(frozen=True)
class Model:
    """A model of a paper. All layers have experts, whose ffn dimension is twice the model dimension."""

    hidden: int  # model dimension
    seq_length: int  # tokens of a sequence
    layers: int


@dataclass(frozen=True)
class Setting:
    """Setting in which a figure or a cell of a table was measured."""

    model: Model
    cluster: str  # name of the cluster's description
    sigma: float  # spread of the log-normal popularities
    num_devices: int  # all of them form one expert-parallel group
    num_experts: int  # of a layer
    top_k: int  # experts of a token
    sequences: int  # of a device in an iteration
    flops_per_s: tuple[float, float] | None = None  # on experts and other compute; None: the description's
    num_iterations: int = 24
    leaving_share: float | None = None
    """Share of a source's tokens that the topology-aware gate lets leave the node. None: no such gate."""
    precision: str = "fp16"  # of parameters and tokens, or fp32
    layer: int | None = None
    """The only simulated layer, whose loads are those that it has in the whole model. None: all layers."""
    draw: int = 0  # seed of the drawn popularities
    padded: bool = False  # whether buffers of experts are as large as the largest, see padded_counts

    @property
    def job(self) -> MoeJob:
        """Sizes of the training job on each device."""
        return _job(self)

    @property
    def description(self) -> ClusterDescription:
        """Description of the cluster, with the number of nodes that the devices fill."""
        cluster = load_cluster(self.cluster)
        if self.flops_per_s is not None:
            paced = zip(("expert_flops_per_s", "non_expert_flops_per_s"), self.flops_per_s, strict=True)
            cluster = cluster.model_copy(update=dict(paced))
        num_nodes = max(1, self.num_devices // cluster.devices_per_node)
        return cluster.model_copy(update={"num_nodes": num_nodes})

    @property
    def counts_ILDE(self) -> np.ndarray:
        """(token, k) pairs that each source device sends to each expert, int32 ``[I, L, D, E]``."""
        return _counts(self)

    def run(self, name: str, **keys: object) -> StrategyOutcome:
        """Simulate a strategy with some settings. The result is cached."""
        return _run(self, name, tuple(sorted(keys.items())))

    def moe_s_I(self, name: str, **keys: object) -> np.ndarray:
        """Return the seconds of the MoE layers in each iteration, float64 ``[I]``."""
        parts_s = self.run(name, **keys).parts_s
        return np.asarray(sum(parts_s[part] for part in OF_MOE_LAYERS))

    def iteration_s(self, name: str, **keys: object) -> float:
        """Return the mean seconds of an iteration after strategies have measured costs."""
        return float(self.run(name, **keys).iteration_s[PROFILED:].mean())

    def moe_s(self, name: str, **keys: object) -> float:
        """Return the mean seconds of the MoE layers in an iteration."""
        return float(self.moe_s_I(name, **keys)[PROFILED:].mean())


@cache
def _job(setting: Setting) -> MoeJob:
    model, per_node = setting.model, setting.description.devices_per_node
    settings = {
        "model": {
            "num_layers": model.layers if setting.layer is None else 1,
            "hidden_size": model.hidden,
            "ffn_hidden_size": 2 * model.hidden,
            "num_attention_heads": model.hidden // 64,
            "seq_length": model.seq_length,
            "num_experts": setting.num_experts,
            "moe_router_topk": setting.top_k,
            "add_bias_linear": False,
            "position_embedding_type": "rope",
        },
        "data": {"vocab_size": 50257},
        "parallelism": {
            "nproc_per_node": min(per_node, setting.num_devices),
            "num_nodes": max(1, setting.num_devices // per_node),
            "expert_model_parallel_size": setting.num_devices,
            "overlap_grad_reduce": True,
        },
        "training": {
            "train_iters": 1,
            "micro_batch_size": setting.sequences,
            "global_batch_size": setting.sequences * setting.num_devices,
            "fp16": setting.precision == "fp16",
        },
    }
    # The host time of our planners says nothing about the systems that the papers measured.
    return replace(job_of_run(validate(RunConfig, settings, setting.cluster)), host=None)


@cache
def _loads(
    num_layers: int, num_devices: int, num_experts: int, iterations: int, sigma: float, seed: int
) -> np.ndarray:
    """Draw tokens with log-normal popularities that follow a random walk: int32 ``[I, L, D, E]``."""
    rng = np.random.default_rng(seed)
    popularity_LE = sigma * rng.normal(size=(num_layers, num_experts))
    drawn = []
    for _ in range(iterations):
        popularity_LE = popularity_LE + DRIFT * rng.normal(size=popularity_LE.shape)
        share_LE = np.exp(popularity_LE)
        share_LE /= share_LE.sum(axis=1, keepdims=True)
        drawn.append([rng.multinomial(16384, share_E, size=num_devices) for share_E in share_LE])
    return np.array(drawn, np.int32)


@cache
def _counts(setting: Setting) -> np.ndarray:
    job = setting.job
    recorded = _loads(
        setting.model.layers,
        job.num_devices,
        job.num_experts,
        setting.num_iterations,
        setting.sigma,
        setting.draw,
    )
    if setting.layer is not None:
        recorded = recorded[:, setting.layer : setting.layer + 1]
    counts, _ = fitted_loads(recorded, job)
    if setting.leaving_share is not None:
        topology = Topology.uniform(job.num_devices, job.num_devices // setting.description.devices_per_node)
        counts = kept_in_nodes(counts, topology, setting.leaving_share)
    return padded_counts(counts) if setting.padded else counts


@cache
def _run(setting: Setting, name: str, keys: tuple[tuple[str, object], ...]) -> StrategyOutcome:
    with described_systems():
        settings = strategy_settings(name, dict(keys), name)
        return simulate(name, settings, setting.counts_ILDE, setting.description, setting.job)


def padded_counts(counts_ILDE: np.ndarray) -> np.ndarray:
    """Return the rows that DeepSpeed-MoE sends and computes if it drops no token: int32 ``[I, L, D, E]``.

    With ``drop_tokens=False``, its public gate takes the largest count of any expert on any rank as the
    capacity (``deepspeed/moe/sharded_moe.py``), so that every rank sends that many rows to every expert.

    Args:
        counts_ILDE: Integers ``[I, L, D, E]``. (token, k) pairs of each source device for each expert.
    """
    largest = counts_ILDE.max(axis=(2, 3), keepdims=True)
    return np.broadcast_to(largest, counts_ILDE.shape).astype(np.int32)


def kept_in_nodes(counts_ILDE: np.ndarray, topology: Topology, leaving_share: float) -> np.ndarray:
    """Return the approximate loads under the topology-aware gate (FasterMoE, §4.3).

    Pairs that exceed a source's allowance stay in the source's node. They are spread over the node's experts
    in proportion to the experts' own shares. The gate's exact selection would need the scores, which are
    unknown.

    Args:
        counts_ILDE: Integers ``[I, L, D, E]``. (token, k) pairs under a stock gate.
        topology: Node of each device. Owners are even.
        leaving_share: Maximum share of every source's pairs that go to other nodes.

    Returns:
        int32 ``[I, L, D, E]``.
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
