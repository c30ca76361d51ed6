"""Simulates a strategy on a described cluster: its decisions, and their cost in seconds and bytes.

Shape letters: I iterations, Z micro-batches, L MoE layers, D devices, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
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
from megatron_fssdp.planning.memory import ExpertMemory, expert_memory, memory_capacity
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.simulation.lanes import PARTS, Lanes
from megatron_fssdp.simulation.layer_record import IterationRecord, LayerPrices
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.replay import OnPlan, replay_strategy, warm_up_iterations
from megatron_fssdp.simulation.workloads import counts_of_shares
from megatron_fssdp.strategies.ep import EpSettings
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy
from megatron_fssdp.systems.system_list import SYSTEMS


@dataclass(frozen=True)
class DeviceMemory:
    """Peak memory of the device that needs the most, and what it has, if known.

    Activations are an estimate without attention matrices and with the rows of the most loaded device.
    """

    experts: ExpertMemory
    dense_bytes: int
    activation_bytes: int
    capacity_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """Bytes of experts, dense parameters and activations together."""
        return self.experts.total_bytes + self.dense_bytes + self.activation_bytes

    @property
    def runs_out(self) -> bool:
        """Whether the device needs more memory than it has."""
        return self.capacity_bytes is not None and self.total_bytes > self.capacity_bytes


_SUMS = ("tokens_D", "cross_node", "host_s")
"""What a record has for all its micro-batches together; the rest is of one."""


@dataclass(frozen=True, eq=False)
class StrategyOutcome:
    """Result of simulating a strategy."""

    parts_s: dict[str, np.ndarray]  # seconds of each iteration's parts, float64 [I], by the names in PARTS
    iterations: list[IterationRecord]  # what the strategy decides in every iteration, and what that costs
    memory: DeviceMemory
    warm_up: int  # number of first iterations in which the strategy measures or has no history

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
        """(token, k) pairs that each device computes, integers ``[I, L, D]``."""
        return self.of_layers("tokens_D")

    @property
    def load_max_over_mean_IL(self) -> np.ndarray:
        """Max/mean device load of a micro-batch in (token, k) pairs, the mean of all: float64 ``[I, L]``."""
        tokens_IZLD = self._of_micro_batches("tokens_D")
        mean_IZL = np.maximum(tokens_IZLD.mean(axis=3), 1e-12)
        return np.asarray((tokens_IZLD.max(axis=3) / mean_IZL).mean(axis=1))

    @property
    def moved_I(self) -> np.ndarray:
        """Number of experts that get a new owner or a new resident replica, int64 ``[I]``."""
        return np.array([iteration.num_moved for iteration in self.iterations])

    def of_layers(self, name: str) -> np.ndarray:
        """The named attribute of every layer's record, ``[I, L]``, or ``[I, L, D]`` for tokens.

        It is the sum over the micro-batches for what is counted in all of them, or the mean.
        """
        of_all = self._of_micro_batches(name)
        return of_all.sum(axis=1) if name in _SUMS else of_all.mean(axis=1)

    def _of_micro_batches(self, name: str) -> np.ndarray:
        return np.array(
            [
                [[getattr(layer, name) for layer in layers] for layers in iteration.micro_batches]
                for iteration in self.iterations
            ]
        )

    def spans(self, iteration: int) -> list[tuple[str, str, float, float]]:
        """The spans of one iteration as (lane, name, begin, end), with times in seconds."""
        spans: list[tuple[str, str, float, float]] = []
        lanes = Lanes(lambda *span: spans.append(span))
        lanes.run_iteration(self.iterations[iteration])
        return spans


def simulate(
    name: str,
    settings: StrategySettings,
    counts_ILDE: np.ndarray,
    cluster: ClusterDescription,
    job: MoeJob,
    *,
    past_ILDE: np.ndarray | None = None,
    on_plan: OnPlan | None = None,
    planned_for: ClusterDescription | None = None,
) -> StrategyOutcome:
    """Simulate a strategy on loads: its seconds, decisions, traffic and memory.

    ``none`` is simulated as ``ep``, because tokens travel in the same way. Loads, with or without an axis of
    micro-batches, and the optional arguments are those of :func:`replay_strategy`. The strategy plans with
    the costs of ``cluster``, or of another description ``planned_for``.

    Raises:
        ValueError: The loads do not have the job's sizes, or the job does not fit cluster or strategy.
    """
    wanted = (job.num_layers, job.num_devices, job.num_experts)
    if counts_ILDE.shape[-3:] != wanted or not len(counts_ILDE):
        raise ValueError(
            f"counts_ILDE has shape {counts_ILDE.shape}, wanted (iterations, layers, devices, experts), "
            f"where the last three are {wanted} as in the job"
        )
    topology = topology_of(cluster, job.num_devices)
    strategy = checked_strategy(name, settings, cluster, job)
    # Earlier iterations fill the history and have been measured.
    warm_up = 0 if past_ILDE is not None else warm_up_iterations(strategy, len(counts_ILDE))
    first_pairs = None
    if cluster.memory_bytes is not None and strategy.profile_iterations:
        first_ILDE = (counts_ILDE if past_ILDE is None else past_ILDE)[:1]
        first_pairs = _pairs_at_peak(
            checked_strategy(name, settings, cluster, job), first_ILDE, topology, job
        )
    profile = layer_profile(job, planned_for or cluster, strategy.replica_life, first_pairs)
    profile = replace(profile, deduplicated=strategy.travel.exchange == "deduplicated")
    ring = strategy.ring(0, topology)
    steps = None if ring is None else SteppedExchange.of(ring, topology, job.messages(cluster).step_host_s)
    host = HostWork() if job.host is None else job.host.of_layer(name, job.num_experts, job.num_devices)
    if name in SYSTEMS:
        host = HostWork(after_gate_s=SYSTEMS[name].plan_s)
    plans_s = 0.0
    if strategy.shares_plans and job.num_layers > 1:
        plans_s = -(-job.num_layers // job.num_devices) * host.before_gate_s
        host = host._replace(before_gate_s=plans_s / job.num_layers)
    prices = LayerPrices(cluster, cluster_links(cluster), job, topology, steps, host, plans_s)
    replayed = replay_strategy(
        *(strategy, counts_ILDE, topology, profile),
        num_micro_batches=job.num_micro_batches,
        past_ILDE=past_ILDE,
        on_plan=on_plan,
    )
    iterations = [prices.iteration(decided) for decided in replayed]
    parts: list[dict[str, float]] = []
    for before, iteration in zip((None, *iterations), iterations, strict=False):
        # Equal layers are the same objects.
        is_same = before is not None and vars(before) == vars(iteration)
        parts.append(parts[-1] if is_same else Lanes().run_iteration(iteration).parts_s)
    parts_s = {part: np.array([seconds[part] for seconds in parts]) for part in PARTS}
    memory = device_memory(job, cluster, iterations, strategy.resident_slots)
    return StrategyOutcome(parts_s, iterations, memory, warm_up)


def checked_strategy(
    name: str, settings: StrategySettings, cluster: ClusterDescription, job: MoeJob
) -> Strategy:
    """A new strategy or system for a job, ``ep`` for ``none``; a ValueError if it does not fit the job."""
    topology = topology_of(cluster, job.num_devices)
    if name in SYSTEMS:
        strategy = SYSTEMS[name].strategy(settings)
    else:
        strategy = build_strategy("ep", EpSettings()) if name == "none" else build_strategy(name, settings)
    try:
        strategy.check_sizes(job.num_experts, topology)
        is_ours = strategy.travel.exchange == "deduplicated" or strategy.travel.smart_schedule is True
        if job.num_peers > 1 and strategy.travel.smart_schedule:
            raise ValueError("smart_schedule needs whole experts; use expert_tensor_parallel_size 1")
        if job.choices is not None and job.choices.is_fused and is_ours:
            reason = "moe_token_dispatcher_type flex sends the tokens itself"
            raise ValueError(f"{reason}; remove exchange and smart_schedule")
    except ValueError as error:
        raise ValueError(f"strategy {name}: {error}") from None
    return strategy


def balanced_counts(counts_ILDE: np.ndarray) -> np.ndarray:
    """One iteration in which every source sends equally many pairs to each expert, int64 ``[1, L, D, E]``.

    Each source has its mean number of pairs of ``counts_ILDE``, which may be of micro-batches. Under ``ep``,
    this is the ideal that UltraEP compares itself with (force-balanced).
    """
    if counts_ILDE.ndim == 5:
        counts_ILDE = counts_ILDE.sum(axis=1)
    pairs_LD = np.rint(counts_ILDE.sum(axis=3).mean(axis=0)).astype(np.int64)
    even_IDE = np.ones((1, *counts_ILDE.shape[2:]))
    return np.stack([counts_of_shares(even_IDE, pairs_D, top_k=1) for pairs_D in pairs_LD], axis=1)


def _pairs_at_peak(strategy: Strategy, counts_ILDE: np.ndarray, topology: Topology, job: MoeJob) -> float:
    """(token, k) pairs of the busiest device in the first iteration, in which a run measures its memory.

    All micro-batches count as the one with the busiest device. The strategy is a new one.
    """
    replayed = next(
        replay_strategy(strategy, counts_ILDE, topology, None, num_micro_batches=job.num_micro_batches)
    )
    number = len(replayed.micro_batches)
    times, most = job.num_micro_batches // number, 0.0
    for layers in replayed.micro_batches:
        of_layers = [plan.dispatch(counts_DE, topology, times) for _, plan, counts_DE in layers]
        most = max(most, job.kept_pairs(np.stack([record.device_tokens_D for record in of_layers])))
    return number * most


def layer_profile(
    job: MoeJob, cluster: ClusterDescription, life: ReplicaLife, pairs: float | None = None
) -> LayerProfile:
    """The profile that a run on the cluster would measure.

    The life of replicas decides about memory, and the ``pairs`` of the busiest device in the iteration in
    which memory is measured; by default those of even loads.
    """
    held = job.held_replicas(life)
    capacity, mixed_capacity = job.num_experts, (job.num_experts, 0, job.num_experts)
    if cluster.memory_bytes is not None:
        without = device_memory(job, cluster, pairs=pairs)
        capacity, mixed_capacity = memory_capacity(
            max(0, int(cluster.memory_bytes - without.total_bytes)),
            held,
            num_experts=job.num_experts,
            owned_per_layer=-(-job.num_experts // job.num_devices),
            messages=job.messages(cluster) if job.on_cuda else None,
        )
    return LayerProfile(
        non_moe_s=min(job.before_gate_flops_L) / cluster.non_expert_flops_per_s,
        cluster=cluster_cost(cluster),
        expert_bytes=job.expert_bytes,
        token_bytes=job.token_bytes,
        flops_per_token=job.expert_flops_per_token,
        memory_capacity=capacity,
        mixed_capacity=mixed_capacity,
        gradient_bytes=held.sent_bytes,
        num_micro_batches=job.num_micro_batches,
        owned_bytes=job.owned_bytes,
        messages=job.messages(cluster),
        choices=job.choices or TokenChoices(job.top_k),
    )


def device_memory(
    job: MoeJob,
    cluster: ClusterDescription,
    iterations: Sequence[IterationRecord] = (),
    resident_slots: int = 0,
    pairs: float | None = None,
) -> DeviceMemory:
    """The peak memory of the device that needs the most under a strategy.

    Without decisions (``iterations``), there are no replicas and so many ``pairs``, by default
    those of even loads. Memory for resident replicas is reserved from the start.
    """
    if pairs is None:
        pairs = job.kept_pairs(np.full((job.num_layers, 1), job.pairs_per_device))
    owned = max(job.num_experts // job.num_devices, 1)
    of_all = (layer for iteration in iterations for layers in iteration.micro_batches for layer in layers)
    layers = [*dict.fromkeys(of_all)]
    if layers:
        # Activations are those of the micro-batch with the busiest device.
        pairs = max(
            len(iteration.micro_batches) * job.kept_pairs(np.stack([layer.tokens_D for layer in layers]))
            for iteration in iterations
            for layers in iteration.micro_batches
        )
        owned = max(layer.most_owned for layer in layers)
    most = {
        life: max((record.most_replicas for record in layers if record.life is life), default=0)
        for life in ReplicaLife
    }
    if resident_slots:
        most[ReplicaLife.RESIDENT] = min(resident_slots, job.num_experts - job.num_experts // job.num_devices)
    experts = expert_memory(
        held=job.held_replicas(ReplicaLife.ITERATION),
        slots_per_device=-(-job.num_layers * job.num_experts // job.num_devices),
        replicas={life: replicas for life, replicas in most.items() if replicas},
        owned_per_layer=owned,
        gradient_bytes=job.gradient_bytes,
        optimizer=job.optimizer,
        expert_data_parallel_size=job.expert_data_parallel_size,
        messages=job.messages(cluster),
        most_received=max((layer.most_received for layer in layers), default=0),
    )
    dense_bytes = job.dense_elements * (job.dtype_bytes + job.gradient_bytes)
    dense_bytes += job.optimizer.state_bytes(job.dense_elements, job.data_parallel_size)
    activation_bytes = job.micro_batches_in_flight * job.activation_bytes + job.recomputed_bytes
    activation_bytes += job.activation_bytes_per_pair * pairs / job.num_micro_batches
    return DeviceMemory(experts, dense_bytes, int(activation_bytes), cluster.memory_bytes)
