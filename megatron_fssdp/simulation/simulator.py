"""Simulates a strategy on a described cluster: its decisions, and their cost in seconds and bytes.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.strategy_settings import (
    EpSettings,
    PlacementSettings,
    StrategySettings,
)
from megatron_fssdp.planning.cost.cluster_cost import cluster_cost
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import exchange_times, expert_seconds, transfer_times
from megatron_fssdp.planning.cost.link_seconds import ClusterLinks, LinkTimes, cluster_links, topology_of
from megatron_fssdp.planning.cost.stepped_exchange import SteppedExchange
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.memory.materialization_limits import memory_capacity
from megatron_fssdp.planning.memory.memory_accounting import FP32_BYTES
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.simulation.device_memory import DeviceMemory, device_memory
from megatron_fssdp.simulation.iteration_timeline import PARTS, IterationTimeline, LayerSeconds, OnSpan
from megatron_fssdp.simulation.layer_ledger import LayerLedger, TransferColumns
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.replay import OnPlan, replay_strategy
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import LayerContext, Strategy


@dataclass(frozen=True, eq=False)
class StrategyOutcome:
    """Result of simulating a strategy.

    Attributes:
        name: Name of the strategy.
        parts_s: Seconds of each iteration's parts, float64 ``[I]``, by the names in ``PARTS``.
        ledger: Decisions of the strategy and the traffic that they cause.
        memory: Peak memory of the device that needs the most.
        layers: Times of all layers, from which the spans of an iteration are computed.
    """

    name: str
    parts_s: dict[str, np.ndarray]
    ledger: LayerLedger
    memory: DeviceMemory
    layers: "LayerTimes"

    @property
    def iteration_s(self) -> np.ndarray:
        """Seconds of each iteration, float64 ``[I]``."""
        return np.asarray(sum(self.parts_s.values()))

    @property
    def mean_s(self) -> float:
        """Mean seconds of an iteration."""
        return float(self.iteration_s.mean())

    @property
    def load_max_over_mean_IL(self) -> np.ndarray:
        """Max/mean device load in (token, k) pairs, float64 ``[I, L]``."""
        mean_IL = self.ledger.tokens_ILD.mean(axis=2)
        return self.ledger.tokens_ILD.max(axis=2) / np.maximum(mean_IL, 1e-12)


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
    """Simulate a strategy on loads.

    Args:
        name: Name of the strategy. ``none`` is simulated as ``ep`` with the collectives of Megatron's
            dispatcher.
        settings: Settings of the strategy.
        counts_ILDE: Integers ``[I, L, D, E]``. (token, k) pairs that each source device sends to each expert.
        cluster: Link and compute costs of the cluster.
        job: Sizes and parallelism of the training job.
        past_ILDE: Pairs of the iterations before the first one, as ``counts_ILDE``. They only fill the load
            history.
        layer_numbers: Megatron's number of each layer, or None for 1 to L.
        on_plan: Function that is called with the iteration, the layer's index and the final plan.

    Returns:
        Seconds, decisions, traffic and memory of the strategy.

    Raises:
        ValueError: The loads do not have the job's sizes, or the job does not fit the cluster.
    """
    wanted = (job.num_layers, job.num_devices, job.num_experts)
    if counts_ILDE.ndim != 4 or counts_ILDE.shape[1:] != wanted or not len(counts_ILDE):
        raise ValueError(
            f"counts_ILDE has shape {counts_ILDE.shape}, wanted (iterations, layers, devices, experts), "
            f"where the last three are {wanted} as in the job"
        )
    topology = topology_of(cluster, job.num_devices)
    strategy = _strategy(name, settings)
    profile = layer_profile(job, cluster, strategy.replica_life)
    ledger = replay_strategy(
        strategy,
        counts_ILDE,
        topology,
        profile,
        num_micro_batches=job.num_micro_batches,
        past_ILDE=past_ILDE,
        layer_numbers=layer_numbers,
        on_plan=on_plan,
    )
    links = cluster_links(cluster, is_megatrons=name == "none", on_cuda=job.on_cuda)
    ring = strategy.ring(0, topology)
    steps = None if ring is None else SteppedExchange.of(ring, topology, job.messages.step_host_s)
    layers = LayerTimes(ledger, cluster, links, job, steps)
    context = LayerContext(1, even_owners(job.num_experts, job.num_devices), topology)
    memory = device_memory(
        job,
        cluster,
        slots=strategy.slots(replace(context, profile=profile)),
        ledger=ledger,
        life=strategy.replica_life,
    )
    return StrategyOutcome(name, layers.parts_s(), ledger, memory, layers)


def balanced_counts(counts_ILDE: np.ndarray) -> np.ndarray:
    """Return one iteration in which every source sends the same number of pairs to each expert.

    Each source has its mean number of pairs. The remainders of the division are distributed over the experts,
    so that no expert gets the remainders of all sources.

    Args:
        counts_ILDE: Integers ``[I, L, D, E]``. (token, k) pairs that each source device sends to each expert.

    Returns:
        int64 ``[1, L, D, E]``.
    """
    num_experts = counts_ILDE.shape[3]
    pairs_LD = np.rint(counts_ILDE.sum(axis=3).mean(axis=0)).astype(np.int64)
    start_LD = np.cumsum(pairs_LD, axis=1) - pairs_LD
    position_LDE = (np.arange(num_experts) - start_LD[..., None]) % num_experts
    counts_LDE = pairs_LD[..., None] // num_experts + (position_LDE < (pairs_LD % num_experts)[..., None])
    return counts_LDE[None]


def ceiling_s(counts_ILDE: np.ndarray, cluster: ClusterDescription, job: MoeJob) -> float:
    """Return the seconds of an iteration under plain expert parallelism with balanced routing.

    Args:
        counts_ILDE: Integers ``[I, L, D, E]``. (token, k) pairs that each source device sends to each expert.
        cluster: Link and compute costs of the cluster.
        job: Sizes and parallelism of the training job.
    """
    return simulate("ep", EpSettings(), balanced_counts(counts_ILDE), cluster, job).mean_s


def layer_profile(job: MoeJob, cluster: ClusterDescription, life: ReplicaLife) -> LayerProfile:
    """Return the profile that a run on the cluster would measure in its first iterations.

    Args:
        job: Sizes and parallelism of the training job.
        cluster: Link and compute costs of the cluster.
        life: Lifetime of the replicas, which decides how much memory they need.
    """
    capacity, held = job.num_experts, job.held_replicas(life)
    if cluster.memory_bytes is not None:
        without = device_memory(job, cluster, slots=0, ledger=None, life=life)
        capacity = memory_capacity(
            max(0, int(cluster.memory_bytes - without.total_bytes)),
            expert_bytes=job.expert_bytes,
            gradient_bytes_per_expert=job.expert_elements * FP32_BYTES,
            num_experts=job.num_experts,
            held=held,
            buffered_bytes=job.messages.buffered_bytes if job.on_cuda else None,
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
    )


class LayerTimes:
    """Seconds of the parts of every layer, and of the iterations that consist of them.

    Args:
        ledger: Decisions and traffic of every layer.
        cluster: Link and compute costs of the cluster.
        links: Links of the cluster, as each kind of transfer uses them.
        job: Sizes and parallelism of the training job.
        steps: Steps of the layers that run under the smart schedule. None if no layer does.
    """

    def __init__(
        self,
        ledger: LayerLedger,
        cluster: ClusterDescription,
        links: ClusterLinks,
        job: MoeJob,
        steps: SteppedExchange | None = None,
    ) -> None:
        self._ledger, self._cluster, self._job = ledger, cluster, job
        self._counts_s = links.gather_counts_s(ledger.topology, job.num_experts)
        dispatch, combine = exchange_times(
            links.all_to_all, ledger.dispatch.busiest(), job.token_bytes, job.num_micro_batches
        )
        experts_s = expert_seconds(
            ledger.tokens_ILD.max(axis=2),
            job.expert_flops_per_token,
            cluster.expert_flops_per_s,
            job.num_micro_batches,
        )
        sums_IL = np.where(
            ledger.rematerialize_IL | ledger.each_pass_IL,
            False,
            ReplicaLife.ITERATION.sums_gradients(job.num_micro_batches),
        )
        reduced_bytes = np.where(
            sums_IL | ledger.resident_IL, job.expert_elements * FP32_BYTES, job.expert_bytes
        )

        def transfer(
            columns: TransferColumns, expert_bytes: int | np.ndarray, *, adds: bool = False
        ) -> LinkTimes:
            return transfer_times(links.transfer, columns.traffic(), expert_bytes, job.messages, adds=adds)

        gather = transfer(ledger.gather, job.expert_bytes)
        regather = transfer(ledger.reduce, job.expert_bytes)
        addition_s = transfer(ledger.addition, job.expert_bytes).seconds
        # Gradients of resident replicas are summed at the owners, and the sums travel back.
        reduce_s = (
            np.where(ledger.resident_IL, 2, 1) * transfer(ledger.reduce, reduced_bytes, adds=True).seconds
        )
        # The source with the most tokens sets the time. It also computes tokens that are dropped later.
        slowest_IL = np.maximum(ledger.most_routed_IL / job.pairs_per_device, 1.0)
        s_per_flop_IL = slowest_IL / cluster.non_expert_flops_per_s
        # Split transfers cannot be combined with the smart schedule.
        splits = steps is None
        self._layers = [
            LayerSeconds(
                before_layer_s=job.before_layer_flops_L[layer] * s_per_flop_IL[:, layer],
                before_gate_s=job.before_gate_flops_L[layer] * s_per_flop_IL[:, layer],
                counts_s=self._counts_s,
                dispatch=_of_layer(dispatch, layer),
                combine=_of_layer(combine, layer),
                experts_s=experts_s[:, layer],
                gather=_of_layer(gather, layer),
                addition_s=addition_s[:, layer],
                reduce_s=reduce_s[:, layer],
                regather=_of_layer(regather, layer),
                is_ahead=ledger.ahead_IL[:, layer],
                is_rematerialized=ledger.rematerialize_IL[:, layer],
                is_each_pass=ledger.each_pass_IL[:, layer],
                gather_early=ledger.gather_early_IL[:, layer] * splits,
                reduce_late=ledger.reduce_late_IL[:, layer] * splits,
                steps=steps,
                in_steps=ledger.in_steps_IL[:, layer],
            )
            for layer in range(job.num_layers)
        ]
        self._reshard_s = self._reshard_seconds(links)
        self._links = links

    def parts_s(self) -> dict[str, np.ndarray]:
        """Return the seconds of each iteration's parts, float64 ``[I]``, by the names in ``PARTS``."""
        return self._lay_out(None).parts_s

    def spans(self, iteration: int) -> list[tuple[str, str, float, float]]:
        """Return the spans of one iteration as (lane, name, begin, end), with times in seconds."""
        found: list[tuple[str, str, float, float]] = []

        def keep(lane: str, name: str, begin_s: np.ndarray, end_s: np.ndarray) -> None:
            begin, end = (float(np.broadcast_to(times, self._shape)[iteration]) for times in (begin_s, end_s))
            if end > begin:
                found.append((lane, name, begin, end))

        self._lay_out(keep)
        return found

    def moe_s(self) -> np.ndarray:
        """Return the seconds of each MoE layer's all-to-alls and experts, float64 ``[I, L]``.

        They are the seconds of one micro-batch, both passes included.
        """
        columns = [
            layer.counts_s
            + layer.exchange_and_experts_s(layer.dispatch, layer.combine, layer.experts_s)
            + layer.exchange_and_experts_s(
                layer.combine, layer.dispatch, BACKWARD_PER_FORWARD * layer.experts_s
            )
            for layer in self._layers
        ]
        return np.stack(columns, axis=1)

    def exchange_s(self) -> np.ndarray:
        """Return the seconds of each layer's counts and all-to-alls in a micro-batch: float64 ``[I, L]``.

        Both passes are included. The collectives run one after the other.
        """
        columns = [
            2 * (layer.dispatch.seconds + layer.combine.seconds) + layer.counts_s for layer in self._layers
        ]
        return np.stack(columns, axis=1)

    def expert_shares_D(self, iteration: int, layer: int) -> np.ndarray:
        """Return each device's expert compute divided by that of the slowest device: float64 ``[D]``."""
        tokens_D = self._ledger.tokens_ILD[iteration, layer]
        return np.asarray(tokens_D / max(int(tokens_D.max()), 1))

    @property
    def _shape(self) -> tuple[int]:
        return (self._ledger.num_iterations,)

    def _lay_out(self, on_span: OnSpan | None) -> IterationTimeline:
        timeline = IterationTimeline(self._ledger.num_iterations, on_span)
        timeline.reshard(self._reshard_s)
        num, done = self._job.num_micro_batches, 0
        while done < num:
            before = dict(timeline.parts_s)
            self._pass(timeline, is_first=done == 0, is_last=done == num - 1)
            done += 1
            if on_span is None and done == 2 and num > 3:
                # All micro-batches between the first and the last take the same time.
                timeline.skip({part: timeline.parts_s[part] - before[part] for part in PARTS}, num - 3)
                done = num - 1
        timeline.sync_gradients(self._gradient_sync_s())
        return timeline

    def _pass(self, timeline: IterationTimeline, *, is_first: bool, is_last: bool) -> None:
        layers = self._layers
        behind_s = self._job.after_layers_flops / self._cluster.non_expert_flops_per_s
        for layer, seconds in enumerate(layers):
            above = layers[layer + 1] if layer + 1 < len(layers) else None
            timeline.forward(f"layer {layer + 1}", seconds, is_first, above)
        timeline.compute("behind the layers", behind_s)
        timeline.compute("behind the layers'", 2 * behind_s)
        for layer in range(len(layers) - 1, -1, -1):
            below = layers[layer - 1] if layer else None
            above = layers[layer + 1] if layer + 1 < len(layers) else None
            timeline.backward(f"layer {layer + 1}", layers[layer], below, is_last, above)

    def _reshard_seconds(self, links: ClusterLinks) -> np.ndarray:
        """Return the seconds of moving experts before an iteration, while everything else waits: ``[I]``."""
        job = self._job
        return links.transfer.times(self._ledger.reshard.busiest(), job.owned_bytes).seconds[:, 0]

    def _gradient_sync_s(self) -> float:
        """Return the seconds of the ring all-reduce of dense gradients over data-parallel ranks.

        0 if the reduction is hidden under the backward pass.
        """
        job, cluster = self._job, self._cluster
        if not job.reduces_dense_at_end:
            return 0.0
        ranks = job.data_parallel_size
        # A ring crosses each node's NICs once, for any number of devices in the node.
        link = cluster.intra_node if ranks <= cluster.devices_per_node else cluster.inter_node
        num_bytes = 2 * (ranks - 1) / ranks * job.dense_elements * job.gradient_bytes
        return link.alpha_s + num_bytes / min(
            link.bandwidth_bytes_per_s, cluster.intra_node.bandwidth_bytes_per_s
        )


def _of_layer(times: LinkTimes, layer: int) -> LinkTimes:
    return replace(times, near_s=times.near_s[:, layer], far_s=times.far_s[:, layer])


def _strategy(name: str, settings: StrategySettings) -> Strategy:
    if name == "none":
        return build_strategy("ep", EpSettings())
    if not isinstance(settings, PlacementSettings):
        raise ValueError(
            f"strategy {name}: got {type(settings).__name__}, wanted settings of a placement strategy"
        )
    return build_strategy(name, settings)
