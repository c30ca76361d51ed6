"""Seconds of every layer's parts under a strategy's decisions, and of the iterations that consist of them.

Shape letters: I iterations, L MoE layers, D devices.
"""

from dataclasses import fields

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.host_seconds import HostWork
from megatron_fssdp.planning.cost.layer_profile import EXACT_SHARES_S
from megatron_fssdp.planning.cost.layer_seconds import (
    exchange_times,
    expert_seconds,
    transfer_times,
)
from megatron_fssdp.planning.cost.link_seconds import ClusterLinks, LinkTimes
from megatron_fssdp.planning.cost.stepped_exchange import SteppedExchange
from megatron_fssdp.planning.memory import FP32_BYTES
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.message_size import gather_stages, num_batches, reduction_stages
from megatron_fssdp.simulation.layer_ledger import LayerLedger, TransferColumns
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.timeline.iteration_timeline import PARTS, IterationTimeline, OnSpan
from megatron_fssdp.simulation.timeline.layer_parts import LayerSeconds

NO_HOST_WORK = HostWork()


class LayerTimes:
    """Seconds of the parts of every layer, and of the iterations that consist of them.

    Args:
        ledger: Decisions and traffic of every layer.
        cluster: Link and compute costs of the cluster.
        links: Links of the cluster, as each kind of transfer uses them.
        job: Sizes and parallelism of the training job.
        steps: Steps of the layers that run under the smart schedule. None if no layer does.
        host: What the host of a rank does for each layer.

    Attributes:
        host_s: Seconds in which a rank's host plans and posts messages in an iteration, float64 ``[I]``.
    """

    def __init__(
        self,
        ledger: LayerLedger,
        cluster: ClusterDescription,
        links: ClusterLinks,
        job: MoeJob,
        steps: SteppedExchange | None = None,
        host: HostWork = NO_HOST_WORK,
    ) -> None:
        self._ledger, self._cluster, self._job = ledger, cluster, job
        counts_s = links.gather_counts_s(ledger.topology, job.num_experts)
        counts_IL = counts_s + ledger.exact_IL * (counts_s + EXACT_SHARES_S)
        dispatch, combine = exchange_times(
            links.all_to_all,
            ledger.dispatch.busiest(),
            job.token_bytes,
            job.num_micro_batches,
            job.top_k * ledger.deduplicated_IL,
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
        each_pass_s = host.dispatch_s + host.after_gate_s * ledger.each_pass_IL
        first_pass_s = host.after_gate_s * ~ledger.each_pass_IL
        self._layers = [
            LayerSeconds(
                before_layer_s=job.before_layer_flops_L[layer] * s_per_flop_IL[:, layer],
                before_gate_s=job.before_gate_flops_L[layer] * s_per_flop_IL[:, layer],
                counts_s=counts_IL[:, layer],
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
                host_s=each_pass_s[:, layer],
                host_first_s=first_pass_s[:, layer],
            )
            for layer in range(job.num_layers)
        ]
        self._reshard_s = self._reshard_seconds(links)
        times = job.num_micro_batches
        planned_s = host.before_gate_s + times * each_pass_s + first_pass_s
        self.host_s = planned_s.sum(axis=1) + self._posting_seconds(reduced_bytes)

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
        timeline.wait_for_host(self.host_s)
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

    def _posting_seconds(self, reduced_bytes: np.ndarray) -> np.ndarray:
        """Return the seconds in which a rank posts the messages of all transfers of an iteration: ``[I]``.

        Args:
            reduced_bytes: Bytes of an expert's gradient as it is sent, ``[I, L]``.
        """
        ledger, job, times = self._ledger, self._job, self._job.num_micro_batches

        def batches(
            columns: TransferColumns, num_bytes: int | np.ndarray, *, adds: bool = False
        ) -> np.ndarray:
            hops_IL = columns.num_hops_IL
            stages = reduction_stages(hops_IL) if adds else gather_stages(hops_IL)
            message = job.messages.message_bytes(num_bytes, stages)
            return np.where(columns.num_experts_IL > 0, num_batches(num_bytes, message, hops_IL), 0)

        every = ledger.rematerialize_IL | ledger.each_pass_IL
        posted_IL = (
            np.where(ledger.rematerialize_IL, times, 1) * batches(ledger.gather, job.expert_bytes)
            + np.where(ledger.rematerialize_IL, times, 0) * batches(ledger.reduce, job.expert_bytes)
            + np.where(ledger.each_pass_IL, times, 1) * batches(ledger.addition, job.expert_bytes)
            + np.where(every, times, 1)
            * np.where(ledger.resident_IL, 2, 1)
            * batches(ledger.reduce, reduced_bytes, adds=True)
        )
        return job.messages.batch_host_s * posted_IL.sum(axis=1)

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
    columns = {
        field.name: np.broadcast_to(getattr(times, field.name), times.near_s.shape)[:, layer]
        for field in fields(times)
    }
    return LinkTimes(**columns)
