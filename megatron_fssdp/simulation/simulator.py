"""Simulates a strategy on a described cluster: its decisions, and their cost in seconds and bytes.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.strategy.shipped_settings import EpSettings
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.host_seconds import HostWork
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.link_seconds import (
    SteppedExchange,
    cluster_cost,
    cluster_links,
    topology_of,
)
from megatron_fssdp.planning.memory import FP32_BYTES, memory_capacity
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.simulation.device_memory import DeviceMemory, device_memory
from megatron_fssdp.simulation.lanes import PARTS, Lanes
from megatron_fssdp.simulation.layer_record import LayerPrices, LayerRecord
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.replay import IterationRecord, replay_strategy, warm_up_iterations
from megatron_fssdp.simulation.workloads import counts_of_shares
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy

OnPlan = Callable[[int, int, LayerPlan], None]


@dataclass(frozen=True, eq=False)
class StrategyOutcome:
    """Result of simulating a strategy.

    Attributes:
        parts_s: Seconds of each iteration's parts, float64 ``[I]``, by the names in ``PARTS``.
        iterations: Decisions of the strategy in every iteration, and the traffic that they cause.
        memory: Peak memory of the device that needs the most.
        prices: Prices of the layers, from which the spans of an iteration are computed.
        warm_up: Number of first iterations in which the strategy measures or has no history.
    """

    name: str
    parts_s: dict[str, np.ndarray]
    iterations: list[IterationRecord[LayerRecord]]
    topology: Topology
    memory: DeviceMemory
    prices: LayerPrices
    warm_up: int = 0

    @property
    def iteration_s(self) -> np.ndarray:
        """Seconds of each iteration, float64 ``[I]``."""
        return np.asarray(sum(self.parts_s.values()))

    @property
    def host_s(self) -> float:
        """Mean seconds in which a rank's host works in an iteration, most of them beside the device."""
        return float(self.of_layers("host_s").sum(axis=1).mean())

    @property
    def mean_s(self) -> float:
        """Mean seconds of an iteration, warm-up included."""
        return float(self.iteration_s.mean())

    @cached_property
    def tokens_ILD(self) -> np.ndarray:
        """(token, k) pairs that each device computes, int32 ``[I, L, D]``."""
        return self.of_layers("tokens_D")

    @property
    def load_max_over_mean_IL(self) -> np.ndarray:
        """Max/mean device load in (token, k) pairs, float64 ``[I, L]``."""
        mean_IL = self.tokens_ILD.mean(axis=2)
        return self.tokens_ILD.max(axis=2) / np.maximum(mean_IL, 1e-12)

    @property
    def moved_I(self) -> np.ndarray:
        """Number of experts that get a new owner or a new resident replica, int64 ``[I]``."""
        return np.array([iteration.num_moved for iteration in self.iterations])

    def of_layers(self, name: str) -> np.ndarray:
        """The named attribute of every layer's record, ``[I, L]``, or ``[I, L, D]`` for tokens."""
        return np.array([[getattr(layer, name) for layer in one.layers] for one in self.iterations])

    def spans(self, iteration: int) -> list[tuple[str, str, float, float]]:
        """The spans of one iteration as (lane, name, begin, end), with times in seconds."""
        found: list[tuple[str, str, float, float]] = []
        lanes = Lanes(lambda *span: found.append(span))
        lanes.run_iteration(self.iterations[iteration], self.prices)
        return found


def simulate(
    name: str,
    settings: StrategySettings,
    counts_ILDE: np.ndarray,
    cluster: ClusterDescription,
    job: MoeJob,
    *,
    past_ILDE: np.ndarray | None = None,
    layer_numbers: Sequence[int] | None = None,
    on_plan: OnPlan | None = None,
) -> StrategyOutcome:
    """Simulate a strategy on loads: its seconds, decisions, traffic and memory.

    Args:
        name: Name of the strategy. ``none`` is simulated as ``ep`` with the collectives of Megatron's
            dispatcher.
        settings: Settings of the strategy.
        counts_ILDE: (token, k) pairs that each source device sends to each expert, integers.
        cluster: Link and compute costs of the cluster.
        job: Sizes and parallelism of the training job.
        past_ILDE: Pairs of the iterations before the first one, which only fill the load history.
        layer_numbers: Megatron's number of each layer, or None for 1 to L.
        on_plan: Function that is called with the iteration, the layer's index and the final plan.

    Raises:
        ValueError: The loads do not have the job's sizes, or the job does not fit cluster or strategy.
    """
    wanted = (job.num_layers, job.num_devices, job.num_experts)
    if counts_ILDE.ndim != 4 or counts_ILDE.shape[1:] != wanted or not len(counts_ILDE):
        raise ValueError(
            f"counts_ILDE has shape {counts_ILDE.shape}, wanted (iterations, layers, devices, experts), "
            f"where the last three are {wanted} as in the job"
        )
    topology = topology_of(cluster, job.num_devices)
    strategy = checked_strategy(name, settings, cluster, job)
    # Earlier iterations fill the history and have been measured.
    warm_up = 0 if past_ILDE is not None else warm_up_iterations(strategy, len(counts_ILDE))
    profile = layer_profile(job, cluster, strategy.replica_life)
    profile = replace(profile, deduplicated=strategy.travel.exchange == "deduplicated")
    links = cluster_links(cluster, is_megatrons=name == "none", on_cuda=job.on_cuda)
    ring = strategy.ring(0, topology)
    steps = None if ring is None else SteppedExchange.of(ring, topology, job.messages.step_host_s)
    host = HostWork() if job.host is None else job.host.of_layer(name, job.num_experts, job.num_devices)
    prices = LayerPrices(cluster, links, job, topology, steps, host)

    def on_layer(
        iteration: int, layer: int, planned: LayerPlan, plan: LayerPlan, counts_DE: np.ndarray
    ) -> LayerRecord:
        if on_plan is not None:
            on_plan(iteration, layer, plan)
        return prices.record(layer, planned, plan, counts_DE)

    iterations = replay_strategy(
        strategy,
        counts_ILDE,
        topology,
        profile,
        on_layer,
        num_micro_batches=job.num_micro_batches,
        past_ILDE=past_ILDE,
        layer_numbers=layer_numbers,
    )
    parts = [Lanes().run_iteration(iteration, prices).parts_s for iteration in iterations]
    parts_s = {part: np.array([seconds[part] for seconds in parts]) for part in PARTS}
    context = LayerContext(1, even_owners(job.num_experts, job.num_devices), topology)
    memory = device_memory(
        job,
        cluster,
        slots=strategy.slots(replace(context, profile=profile)),
        iterations=iterations,
        life=strategy.replica_life,
    )
    return StrategyOutcome(name, parts_s, iterations, topology, memory, prices, warm_up)


def checked_strategy(
    name: str, settings: StrategySettings, cluster: ClusterDescription, job: MoeJob
) -> Strategy:
    """A new strategy object, after a check that it can train a job. ``none`` is simulated as ``ep``.

    Raises:
        ValueError: The job does not fit the cluster or the strategy.
    """
    topology = topology_of(cluster, job.num_devices)
    strategy = build_strategy("ep", EpSettings()) if name == "none" else build_strategy(name, settings)
    try:
        strategy.check_sizes(job.num_experts, topology)
    except ValueError as error:
        raise ValueError(f"strategy {name}: {error}") from None
    return strategy


def balanced_counts(counts_ILDE: np.ndarray) -> np.ndarray:
    """One iteration in which every source sends equally many pairs to each expert, int64 ``[1, L, D, E]``.

    Each source has its mean number of pairs of ``counts_ILDE``. No expert gets the remainders of all sources.
    """
    pairs_LD = np.rint(counts_ILDE.sum(axis=3).mean(axis=0)).astype(np.int64)
    even_IDE = np.ones((1, *counts_ILDE.shape[2:]))
    return np.stack([counts_of_shares(even_IDE, pairs_D, top_k=1) for pairs_D in pairs_LD], axis=1)


def ceiling_s(counts_ILDE: np.ndarray, cluster: ClusterDescription, job: MoeJob) -> float:
    """Seconds of an iteration under plain expert parallelism with the :func:`balanced_counts` of loads."""
    return simulate("ep", EpSettings(), balanced_counts(counts_ILDE), cluster, job).mean_s


def layer_profile(job: MoeJob, cluster: ClusterDescription, life: ReplicaLife) -> LayerProfile:
    """The profile that a run on the cluster would measure; the life of replicas decides about memory."""
    capacity, held = job.num_experts, job.held_replicas(life)
    if cluster.memory_bytes is not None:
        without = device_memory(job, cluster, slots=0, life=life)
        capacity = memory_capacity(
            max(0, int(cluster.memory_bytes - without.total_bytes)),
            held,
            expert_elements=job.expert_elements,
            dtype_bytes=job.dtype_bytes,
            num_experts=job.num_experts,
            messages=job.messages if job.on_cuda else None,
        )
    return LayerProfile(
        non_moe_s=min(job.before_gate_flops_L) / cluster.non_expert_flops_per_s,
        cluster=cluster_cost(cluster),
        expert_bytes=job.expert_bytes,
        token_bytes=job.token_bytes,
        flops_per_token=job.expert_flops_per_token,
        memory_capacity=capacity,
        gradient_bytes=job.expert_elements * FP32_BYTES if held.sends_fp32 else job.expert_bytes,
        num_micro_batches=job.num_micro_batches,
        owned_bytes=job.owned_bytes,
        messages=job.messages,
        choices=job.choices or TokenChoices(job.top_k),
    )
