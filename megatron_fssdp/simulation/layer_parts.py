"""Seconds of one layer's parts in an iteration, by the price functions that all planners use."""

from dataclasses import dataclass
from functools import cached_property

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.host_seconds import HostWork
from megatron_fssdp.planning.cost.layer_profile import EXACT_SHARES_S
from megatron_fssdp.planning.cost.layer_seconds import exchange_times, expert_seconds, transfer_times
from megatron_fssdp.planning.cost.layer_traffic import BusiestLinks, TransferTraffic
from megatron_fssdp.planning.cost.link_seconds import ClusterLinks, LinkTimes
from megatron_fssdp.planning.cost.stepped_exchange import SteppedExchange
from megatron_fssdp.planning.cost.transfer_split import WHOLE, TransferSplit
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.memory.memory_accounting import FP32_BYTES
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import gather_stages, num_batches, reduction_stages
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.replay import IterationRecord, LayerRecord

UNUSED = LinkTimes(0.0, 0.0)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False, slots=True)
class LayerParts:
    """Seconds of the parts of one layer's forward pass in a micro-batch.

    Attributes:
        before_layer_s: Seconds of compute between the previous MoE layer and this transformer layer.
        before_gate_s: Seconds of compute before the gate, under which spAG can be hidden.
        counts_s: Seconds of gathering the router counts and, with exact dispatch, of computing shares.
        dispatch: Seconds of the all-to-alls of rows and probabilities.
        combine: Seconds of the all-to-all of results.
        experts_s: Seconds of the experts on the slowest device.
        gather_s: Seconds of spAG.
        addition_s: Seconds of the transfer that a plan after the gate adds.
        reduce_s: Seconds of spRS.
        regather: Seconds of the spAG of all replicas before the backward pass.
        life: How long the replicas live.
        ahead: Whether transfers run at the same time as compute.
        split: Shares of spAG and spRS that run at the same time as the experts of the layer before.
        steps: Steps of the smart schedule, if the layer runs in them; otherwise None.
        host_s: Seconds in which the device waits for the host between the counts and the dispatch.
        host_first_s: More of these seconds in an iteration's first micro-batch.
        whole_host_s: Seconds in which the host plans and posts messages for the layer in an iteration.
    """

    before_layer_s: float = 0.0
    before_gate_s: float = 0.0
    counts_s: float = 0.0
    dispatch: LinkTimes = UNUSED
    combine: LinkTimes = UNUSED
    experts_s: float = 0.0
    gather_s: float = 0.0
    addition_s: float = 0.0
    reduce_s: float = 0.0
    regather: LinkTimes = UNUSED
    life: ReplicaLife = ReplicaLife.ITERATION
    ahead: bool = True
    split: TransferSplit = WHOLE
    steps: SteppedExchange | None = None
    host_s: float = 0.0
    host_first_s: float = 0.0
    whole_host_s: float = 0.0

    def exchange_and_experts_s(self, first: LinkTimes, second: LinkTimes, experts_s: float) -> float:
        """Return the seconds from the first sent row to the last result.

        Args:
            first: Seconds of the exchange before the experts.
            second: Seconds of the exchange after the experts.
            experts_s: Seconds of the experts on the slowest device.
        """
        if self.steps is not None:
            return float(self.steps.seconds(first, second, experts_s))
        return float(first.seconds) + experts_s + float(second.seconds)

    @property
    def moe_s(self) -> float:
        """Seconds of the all-to-alls and experts of a micro-batch, both passes included."""
        forward_s = self.exchange_and_experts_s(self.dispatch, self.combine, self.experts_s)
        backward_s = self.exchange_and_experts_s(
            self.combine, self.dispatch, BACKWARD_PER_FORWARD * self.experts_s
        )
        return self.counts_s + forward_s + backward_s

    @property
    def exchange_s(self) -> float:
        """Seconds of the counts and all-to-alls of a micro-batch, in both passes, one after the other."""
        return float(2 * (self.dispatch.seconds + self.combine.seconds)) + self.counts_s


class LayerPrices:
    """Prices the parts of layers on the cluster and for the job of a simulation.

    Args:
        cluster: Link and compute costs of the cluster.
        links: Links of the cluster, as each kind of transfer uses them.
        job: Sizes and parallelism of the training job.
        topology: Node of each device.
        steps: Steps of the layers that run under the smart schedule. None if no layer does.
        host: What the host of a rank does for each layer.
    """

    def __init__(
        self,
        cluster: ClusterDescription,
        links: ClusterLinks,
        job: MoeJob,
        topology: Topology,
        steps: SteppedExchange | None = None,
        host: HostWork | None = None,
    ) -> None:
        self.cluster, self.links, self.job, self._steps = cluster, links, job, steps
        self._host, self._messages, self._times = host or HostWork(), job.messages, job.num_micro_batches
        self._counts_s = links.gather_counts_s(topology, job.num_experts)
        self._reduced_bytes = {
            life: job.expert_elements * FP32_BYTES if job.held_replicas(life).sends_fp32 else job.expert_bytes
            for life in ReplicaLife
        }

    def all_parts(self, record: IterationRecord) -> list[LayerParts]:
        """Return the seconds of the parts of all layers in an iteration.

        Args:
            record: What the strategy does in the iteration.
        """
        return [self.parts(layer, index) for index, layer in enumerate(record.layers)]

    def parts(self, record: LayerRecord, layer: int) -> LayerParts:
        """Return the seconds of a layer's parts.

        Args:
            record: What the layer's plan does.
            layer: Index of the layer among the MoE layers.
        """
        job, host, times, life = self.job, self._host, self._times, record.life
        num_choices = job.top_k if record.deduplicated else 0
        dispatch, combine = exchange_times(
            self.links.all_to_all, record.dispatch, job.token_bytes, times, num_choices
        )
        most_tokens, flops_per_s = int(record.tokens_D.max()), self.cluster.expert_flops_per_s
        # The source with the most tokens sets the time. It also computes tokens that are dropped later.
        s_per_flop = max(record.most_routed / job.pairs_per_device, 1.0) / self.cluster.non_expert_flops_per_s
        each_pass = life is ReplicaLife.MICRO_BATCH
        host_s = host.dispatch_s + each_pass * host.after_gate_s
        host_first_s = (not each_pass) * host.after_gate_s
        reduced_bytes = self._reduced_bytes[life]
        # Gradients of resident replicas are summed at the owners, and the sums travel back.
        reductions = 2 if life is ReplicaLife.RESIDENT else 1
        return LayerParts(
            before_layer_s=job.before_layer_flops_L[layer] * s_per_flop,
            before_gate_s=job.before_gate_flops_L[layer] * s_per_flop,
            counts_s=self._counts_s + record.exact * (self._counts_s + EXACT_SHARES_S),
            dispatch=dispatch,
            combine=combine,
            experts_s=expert_seconds(most_tokens, job.expert_flops_per_token, flops_per_s, times),
            gather_s=float(self._transfer(record.gather, job.expert_bytes).seconds),
            addition_s=float(self._transfer(record.addition, job.expert_bytes).seconds),
            reduce_s=reductions * float(self._transfer(record.reduce, reduced_bytes, adds=True).seconds),
            regather=self._transfer(record.reduce, job.expert_bytes),
            life=life,
            ahead=record.ahead,
            # Split transfers cannot be combined with the smart schedule.
            split=record.split if self._steps is None else WHOLE,
            steps=self._steps if record.in_steps else None,
            host_s=host_s,
            host_first_s=host_first_s,
            whole_host_s=host.before_gate_s
            + times * host_s
            + host_first_s
            + self._posting_s(record, reduced_bytes, reductions),
        )

    def moving_s(self, moved: BusiestLinks) -> float:
        """Return the seconds of moving experts before an iteration, while everything else waits.

        Args:
            moved: Experts on the busiest links.
        """
        return float(self.links.transfer.times(moved, self.job.owned_bytes).seconds)

    @cached_property
    def gradient_sync_s(self) -> float:
        """Seconds of the ring all-reduce of dense gradients over data-parallel ranks.

        0 if the reduction is hidden under the backward pass.
        """
        job, cluster = self.job, self.cluster
        if not job.reduces_dense_at_end:
            return 0.0
        ranks = job.data_parallel_size
        # A ring crosses each node's NICs once, for any number of devices in the node.
        link = cluster.intra_node if ranks <= cluster.devices_per_node else cluster.inter_node
        num_bytes = 2 * (ranks - 1) / ranks * job.dense_elements * job.gradient_bytes
        return link.alpha_s + num_bytes / min(
            link.bandwidth_bytes_per_s, cluster.intra_node.bandwidth_bytes_per_s
        )

    def _transfer(self, traffic: TransferTraffic, expert_bytes: int, *, adds: bool = False) -> LinkTimes:
        if not traffic.num_experts:
            return UNUSED
        return transfer_times(self.links.transfer, traffic, expert_bytes, self._messages, adds=adds)

    def _posting_s(self, record: LayerRecord, reduced_bytes: int, reductions: int) -> float:
        """Return the seconds in which a rank posts the messages of all transfers of an iteration.

        Args:
            record: What the layer's plan does.
            reduced_bytes: Bytes of an expert's gradient as it is sent.
            reductions: Number of transfers that bring gradients home.
        """
        if not self._messages.batch_host_s:
            return 0.0

        def batches(traffic: TransferTraffic, num_bytes: int, stages: int) -> int:
            if not traffic.num_experts:
                return 0
            message = self._messages.message_bytes(num_bytes, stages)
            return int(num_batches(num_bytes, message, traffic.num_hops))

        gather, reduce, addition, num_bytes = (
            record.gather,
            record.reduce,
            record.addition,
            self.job.expert_bytes,
        )
        again = self._times if record.life is ReplicaLife.LAYER_PASS else 0
        posted = (again or 1) * batches(gather, num_bytes, gather_stages(gather.num_hops))
        posted += again * batches(reduce, num_bytes, gather_stages(reduce.num_hops))
        each = self._times if record.life is ReplicaLife.MICRO_BATCH else 1
        posted += each * batches(addition, num_bytes, gather_stages(addition.num_hops))
        stages = reduction_stages(reduce.num_hops)
        posted += (again or each) * reductions * batches(reduce, reduced_bytes, stages)
        return self._messages.batch_host_s * posted
