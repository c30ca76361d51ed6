"""The price of a layer, which all planners compare: its modelled seconds in an iteration, in both passes.

The simulator puts the same pieces on a timeline: :func:`exchange_times`, :func:`expert_seconds` and
:func:`transfer_times`. A test compares the two (``tests/simulation/test_layer_price.py``).

The price follows what the runtime does:

* **Start-ups.** Every micro-batch starts its own collectives. Rows and their probabilities are two
  all-to-alls, in both passes; results are one. So an iteration of n micro-batches pays 6 n start-ups.
* **All-to-alls** last until the busiest device's link inside its node and the busiest node's NICs are both
  done. The devices of a node share its NICs.
* **Transfers** travel in messages, whose size follows one rule (``planning/transfer/message_size.py``). Each
  hop before the last one of a path adds the time of one message, with its start-up and its bytes. A transfer
  takes at least as long as the host needs to post its batches of messages.
* **Gathers** hide under the compute before the layer and under the router counts. The runtime waits for
  replicas later, just before the experts. Time beside the dispatch is not counted, because the rows use the
  same links. What calibration adds, and the replicas of a plan for a single micro-batch, start when the
  counts are known, so that nothing hides them.
* **Reductions** hide under the backward pass of the compute before the layer. Their bytes follow from the
  life of the replicas: sums of several micro-batches and gradients of resident replicas travel in fp32,
  all others in the data type of the parameters.
* **Exact dispatch** adds, before the dispatch, a gather of the counts and the time to compute the shares.
* **Experts** take as long as on the device with the most tokens, three times: forward once, backward twice.

The papers' own formulas (FasterMoE Eq. 8, Pro-Prophet Eq. 1 to 8) are elsewhere, as published.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD, exposed_s
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_traffic import (
    NO_TRANSFER,
    TransferTraffic,
    moves_traffic,
    transfer_traffic,
)
from megatron_fssdp.planning.cost.link_seconds import ClusterLinks, LinkSet, LinkTimes, plain_links
from megatron_fssdp.planning.cost.transfer_split import WHOLE, TransferSplit
from megatron_fssdp.planning.dispatch.token_dispatch import (
    BusiestLinks,
    DispatchPolicy,
    TokenDispatch,
    plan_dispatch,
)
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.message_size import (
    FixedMessages,
    MessageRule,
    gather_stages,
    num_batches,
    reduction_stages,
)
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan, two_level_transfer

PROB_BYTES = 4
"""Bytes of one routing probability. Each row has one, and a separate all-to-all sends them."""

DISPATCH_STARTS = 2
"""Number of all-to-alls of a dispatch: one for rows and one for probabilities.

The backward pass has the same number for the gradients of both.
"""

CHOICE_BYTES = 8
"""Bytes of one choice that travels with a token of the deduplicated exchange: expert and probability."""

HOP_STARTS = 3
"""Number of all-to-alls of each hop of the deduplicated exchange's dispatch: tokens, devices and experts,
probabilities."""


def exchange_times(
    links: LinkSet,
    pairs: BusiestLinks,
    token_bytes: float,
    num_micro_batches: int,
    num_choices: int = 0,
) -> tuple[LinkTimes, LinkTimes]:
    """Seconds of dispatch and of combine of one micro-batch. The backward pass takes the same seconds again.

    Args:
        links: Costs of all-to-alls.
        pairs: (token, k) pairs of an iteration on the busiest links. For the deduplicated exchange, tokens in
            both hops.
        token_bytes: Bytes of one token's hidden state.
        num_micro_batches: Number of micro-batches in the iteration. Each has an equal part of the pairs.
        num_choices: Number of choices that travel with a token of the deduplicated exchange; 0 for the usual
            exchange.
    """
    parts, in_turn = 1 / num_micro_batches, num_choices > 0
    more_bytes = num_choices * CHOICE_BYTES if in_turn else PROB_BYTES
    starts = HOP_STARTS if in_turn else DISPATCH_STARTS
    return (
        links.times(pairs, (token_bytes + more_bytes) * parts, starts, in_turn=in_turn),
        links.times(pairs, token_bytes * parts, in_turn=in_turn),
    )


def expert_seconds(
    most_tokens: float, flops_per_token: float, flops_per_s: float, num_micro_batches: int
) -> float:
    """Seconds of the experts' forward pass in a micro-batch: ``max_d tokens_d / P`` (FasterMoE, Eq. 1).

    Args:
        most_tokens: (token, k) pairs of an iteration on the device that computes most.
        flops_per_token: FLOPs of one expert's forward pass for one token.
        flops_per_s: Throughput of a device.
        num_micro_batches: Number of micro-batches in the iteration.
    """
    return most_tokens * (flops_per_token / flops_per_s / num_micro_batches)


@lru_cache(maxsize=1024)  # prices and splits of a plan ask the same question
def transfer_times(
    links: LinkSet,
    traffic: TransferTraffic,
    expert_bytes: int,
    messages: MessageRule,
    *,
    adds: bool = False,
) -> LinkTimes:
    """Seconds of one SparseAllGather: the busiest links, and one message for each hop before the last.

    This is the volume bound of Hecate, Eq. 1, applied to every link of the plan. SparseReduceScatter is the
    transpose: it uses the same links in the other direction. The size of its messages can differ.

    Args:
        links: Costs of transfers from device to device.
        traffic: Number of experts on the busiest links, and number of hops.
        expert_bytes: Bytes of an expert, or of its gradient.
        messages: How a transfer divides an expert into messages.
        adds: Whether the transfer is a SparseReduceScatter, which adds what arrives.
    """
    num_hops = traffic.num_hops
    num_stages = reduction_stages(num_hops) if adds else gather_stages(num_hops)
    message = messages.message_bytes(expert_bytes, num_stages)
    near_hops, far_hops = traffic.fill_hops
    first_s = near_hops * links.near.time_s(message) + far_hops * links.far_of_node.time_s(message)
    times = links.times(traffic.busiest, expert_bytes, first_s=first_s)
    return times.at_least(messages.batch_host_s * num_batches(expert_bytes, message, num_hops))


def moving_seconds(
    sources_P: np.ndarray, devices_P: np.ndarray, topology: Topology, profile: LayerProfile
) -> float:
    """Seconds to move experts with all their states between iterations. Nothing hides these seconds.

    The runtime exchanges slots from device to device, so no path has a second hop.

    Args:
        sources_P: Device that each moved expert leaves, integers ``[P]``.
        devices_P: Device that gets each moved expert, integers ``[P]``.
        topology: Nodes of the devices.
        profile: Measured costs.
    """
    links = plain_links(profile.cluster).transfer
    traffic = moves_traffic(sources_P, devices_P, topology)
    return links.times(traffic, profile.moved_bytes).seconds


@dataclass(frozen=True, eq=False)
class LayerWork:
    """The work of one layer in an iteration.

    Attributes:
        most_tokens: (token, k) pairs on the device that computes most.
        pairs: (token, k) pairs on the busiest links in one direction of the dispatch.
        gather: Traffic of the SparseAllGather that was planned before the gate.
        replicas: Traffic of a SparseAllGather of all final replicas. SparseReduceScatter is its transpose.
        addition: Traffic of the replicas that calibration gathers after the gate.
        num_choices: Number of experts of each token, if ``pairs`` are tokens of the deduplicated exchange;
            otherwise 0.
    """

    most_tokens: float
    pairs: BusiestLinks
    gather: TransferTraffic = NO_TRANSFER
    replicas: TransferTraffic = NO_TRANSFER
    addition: TransferTraffic = NO_TRANSFER
    num_choices: int = 0

    @classmethod
    def of(
        cls,
        dispatch: TokenDispatch,
        transfer: TransferPlan,
        topology: Topology,
        *,
        planned: TransferPlan | None = None,
        addition: TransferPlan | None = None,
    ) -> "LayerWork":
        """The work of one plan.

        Args:
            dispatch: All dispatches of the iteration together.
            transfer: SparseAllGather of all final replicas.
            topology: Nodes of the devices.
            planned: SparseAllGather that was planned before the gate, if it is not ``transfer``.
            addition: SparseAllGather of the replicas that calibration adds after the gate.
        """
        replicas = transfer_traffic(transfer, topology)
        gather = replicas if planned is None or planned is transfer else transfer_traffic(planned, topology)
        added = NO_TRANSFER if addition is None else transfer_traffic(addition, topology)
        return cls(float(dispatch.device_tokens_D.max()), dispatch.busiest, gather, replicas, added)


@dataclass(frozen=True, eq=False)
class LayerPrice:
    """Seconds of one layer in an iteration, in both passes, by their cause.

    Attributes:
        before_s: Seconds of the compute before the layer, such as attention.
        all_to_all_s: Seconds of router counts, dispatches and combines.
        experts_s: Seconds of the experts on the device that computes most.
        gather_s: Seconds for which compute waits for spAG.
        reduce_s: Seconds for which compute waits for spRS.
    """

    before_s: float
    all_to_all_s: float
    experts_s: float
    gather_s: float
    reduce_s: float

    @property
    def moe_s(self) -> float:
        """All seconds except those of the compute before the layer, which no placement changes."""
        return self.all_to_all_s + self.experts_s + self.gather_s + self.reduce_s

    @property
    def seconds(self) -> float:
        """All seconds of the layer and of the compute before it."""
        return self.before_s + self.moe_s


def layer_seconds(
    work: LayerWork,
    profile: LayerProfile,
    life: ReplicaLife,
    *,
    counts_s: float,
    num_micro_batches: int | None = None,
    hides: bool = True,
    split: TransferSplit = WHOLE,
) -> LayerPrice:
    """Price one layer in an iteration. The top of this file tells what the price contains.

    With re-materialization, the second gather of a micro-batch runs after the reduction of the layer above,
    and both hide under the same compute. The rest of that gather meets combine's backward pass. If both take
    longest on the same kind of link, the rest adds its seconds. Otherwise it runs beside combine. Resident
    replicas have two transfers, the reduction of gradients and the return of the sums, which hide under the
    same compute.

    Args:
        work: Work of the layer in the iteration.
        profile: Measured costs.
        life: How long replicas stay on their devices.
        counts_s: Seconds to gather the router counts of a micro-batch, see :func:`counts_seconds`; with
            exact dispatch those of another gather and of the shares as well.
        num_micro_batches: Number of micro-batches in the iteration. By default it is the profile's.
        hides: Whether transfers run beside compute.
        split: Shares of the transfers that run beside the experts of the layer before, which hide them.
    """
    times = profile.num_micro_batches if num_micro_batches is None else num_micro_batches
    cluster = profile.cluster
    links = plain_links(cluster)
    dispatch, combine = exchange_times(
        links.all_to_all, work.pairs, profile.token_bytes, times, work.num_choices
    )
    experts_s = expert_seconds(work.most_tokens, profile.flops_per_token, cluster.expert_flops_per_s, times)
    both = 1 + BACKWARD_PER_FORWARD
    gather_s, reduce_s = _exposed_seconds(
        work, profile, life, links, times, counts_s if hides else None, split, combine
    )
    return LayerPrice(
        before_s=times * both * profile.non_moe_s,
        all_to_all_s=times * (counts_s + 2 * (dispatch.seconds + combine.seconds)),
        experts_s=times * both * experts_s,
        gather_s=gather_s,
        reduce_s=reduce_s,
    )


def _exposed_seconds(
    work: LayerWork,
    profile: LayerProfile,
    life: ReplicaLife,
    links: ClusterLinks,
    times: int,
    counts_s: float | None,
    split: TransferSplit,
    combine: LinkTimes,
) -> tuple[float, float]:
    """Seconds for which compute waits for spAG and for spRS. Nothing hides them if ``counts_s`` is None."""
    if work.replicas is NO_TRANSFER and work.gather is NO_TRANSFER:
        return 0.0, 0.0

    def times_of(traffic: TransferTraffic, expert_bytes: int, *, adds: bool = False) -> LinkTimes:
        """Seconds of a transfer of experts, or of gradients, with ``expert_bytes`` each."""
        return transfer_times(links.transfer, traffic, expert_bytes, profile.messages, adds=adds)

    hidden_s = 0.0 if counts_s is None else profile.non_moe_s + counts_s
    hidden_back_s = 0.0 if counts_s is None else BACKWARD_PER_FORWARD * profile.non_moe_s
    is_iteration = life in (ReplicaLife.ITERATION, ReplicaLife.RESIDENT)
    reduced_bytes = profile.reduced_bytes if is_iteration else profile.expert_bytes
    again = times_of(work.replicas, profile.expert_bytes)
    is_equal = reduced_bytes == profile.expert_bytes and isinstance(profile.messages, FixedMessages)
    reduce = again if is_equal else times_of(work.replicas, reduced_bytes, adds=True)
    reduce_s = (1 - split.reduce) * reduce.seconds
    if life is ReplicaLife.RESIDENT:
        return 0.0, exposed_s(2 * reduce_s, hidden_back_s)
    if life is ReplicaLife.MICRO_BATCH:
        return times * again.seconds, times * exposed_s(reduce_s, hidden_back_s)
    gather = again if work.gather is work.replicas else times_of(work.gather, profile.expert_bytes)
    gather_s = exposed_s((1 - split.gather) * gather.seconds, hidden_s)
    if work.addition is not NO_TRANSFER:
        gather_s = gather_s + times_of(work.addition, profile.expert_bytes).seconds
    if life is ReplicaLife.ITERATION:
        return gather_s, exposed_s(reduce_s, hidden_back_s)
    left_s = exposed_s(again.seconds, max(0.0, hidden_back_s - reduce_s))
    beside_s = combine.seconds if again.is_far != combine.is_far else 0.0
    gather_s = gather_s + (times - 1) * exposed_s(again.seconds, hidden_s)
    gather_s = gather_s + times * exposed_s(left_s, beside_s)
    return gather_s, times * exposed_s(reduce_s, hidden_back_s)


def counts_seconds(profile: LayerProfile, topology: Topology, num_experts: int) -> float:
    """Seconds in which every device gets the router counts of all others, by the profile's link costs."""
    return plain_links(profile.cluster).gather_counts_s(topology, num_experts)


def placement_seconds(
    counts_DE: np.ndarray,
    placement: ExpertPlacement,
    topology: Topology,
    profile: LayerProfile,
    life: ReplicaLife,
    *,
    dispatch_policy: DispatchPolicy = "even",
) -> LayerPrice:
    """Price a placement under an iteration's counts.

    Args:
        counts_DE: (token, k) pairs of the iteration by source device and expert, int64 ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
        profile: Measured costs.
        life: How long replicas stay on their devices.
        dispatch_policy: How the tokens of an expert are split among its holders.
    """
    dispatch = plan_dispatch(dispatch_policy, counts_DE, placement, topology)
    work = LayerWork.of(dispatch, two_level_transfer(placement, topology), topology)
    return layer_seconds(
        work, profile, life, counts_s=counts_seconds(profile, topology, placement.num_experts)
    )
