"""The price of a layer, which all planners compare: its modelled seconds in an iteration, in both passes.

The formula is in ``kernels/price_formula.py``. The search and ``strategies/plan_price.py``
ask it. The simulator puts the pieces :func:`exchange_times` and :func:`transfer_times` on a timeline;
``tests/simulation/test_layer_price.py`` compares the two. The price follows what the runtime does:

* **All-to-alls** last until the busiest device's link inside its node, its NIC, and the busiest node's NICs,
  which its devices share, are all done. Every micro-batch starts its own: in each pass, two for rows and
  their probabilities and one for results. Megatron's ``flex`` has one kernel for each.
* **Transfers** travel in messages (``planning/transfer/message_size.py``). Each hop before the last one of a
  path adds the time of one message. A transfer takes at least as long as the host needs to post it.
* **Gathers** hide under the compute before the layer and under the router counts, not under the dispatch,
  whose rows use the same links. Nothing hides what calibration adds, nor the replicas of a plan for a single
  micro-batch, because they start when the counts are known.
* **Reductions** hide under the backward pass of the compute before the layer. Sums of several micro-batches
  and gradients of resident replicas travel in fp32, all others in the data type of the parameters. Resident
  replicas also return the sums, under the same compute.
* **Re-materialization.** The second gather of a micro-batch hides under the same compute as the reduction of
  the layer above, and runs after it. The rest of that gather meets combine's backward pass. If both take
  longest on the same kind of link, the rest adds its seconds. Otherwise it runs beside combine.
* **Exact dispatch** adds, before the dispatch, a gather of the counts and the time to compute the shares.
* **Experts** take as long as on the device with the most tokens, three times: forward once, backward twice.

The papers' own formulas (FasterMoE Eq. 8, Pro-Prophet Eq. 1 to 8) are in the strategies' folders, as
published.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.layer_costs import LayerCosts
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.link_seconds import LinkSet, LinkTimes, TransferTraffic, moves_traffic
from megatron_fssdp.planning.dispatch.token_dispatch import BusiestLinks
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.message_size import MessageRule, num_batches

PROB_BYTES = 4
"""Bytes of one routing probability. Each row has one, and a separate all-to-all sends them."""

DISPATCH_STARTS = 2
"""Number of all-to-alls of a dispatch, for rows and for probabilities. Their gradients have as many."""

EXCHANGE_STARTS = 2 * (DISPATCH_STARTS + 1)
"""All-to-alls of a layer in both passes: dispatches and combines."""

CHOICE_BYTES = 8
"""Bytes of one choice that travels with a token of a deduplicated exchange: expert and probability.

DeepEP's are the same (``get_num_bytes_per_token`` in its ``internode.cu``).
"""

HOP_STARTS = 3
"""All-to-alls of each hop of the deduplicated dispatch: tokens, devices and experts, probabilities."""


def _exchanges(
    token_bytes: float, num_micro_batches: int, choices: TokenChoices | None
) -> Iterator[tuple[float, int]]:
    """Bytes of a unit and number of all-to-alls, of a dispatch and of a combine of one micro-batch."""
    more_bytes, starts = PROB_BYTES, DISPATCH_STARTS
    if choices is not None:
        more_bytes, starts = choices.top_k * CHOICE_BYTES, 1 if choices.is_fused else HOP_STARTS
    yield (token_bytes + more_bytes) / num_micro_batches, starts
    yield token_bytes / num_micro_batches, 1


def exchange_times(
    links: LinkSet,
    pairs: BusiestLinks,
    token_bytes: float,
    num_micro_batches: int,
    choices: TokenChoices | None = None,
) -> tuple[LinkTimes, LinkTimes]:
    """Seconds of dispatch and of combine of one micro-batch. The backward pass takes the same seconds again.

    The busiest links have (token, k) pairs of an iteration, or tokens of both deduplicated hops, with their
    ``choices``.
    """
    dispatch, combine = (
        links.times(pairs, unit_bytes, starts, in_turn=_hops_in_turn(choices))
        for unit_bytes, starts in _exchanges(token_bytes, num_micro_batches, choices)
    )
    return dispatch, combine


def _hops_in_turn(choices: TokenChoices | None) -> bool:
    return choices is not None and not choices.is_fused


@lru_cache(maxsize=1024)
def _message_seconds(
    links: LinkSet, num_bytes: int, messages: MessageRule, num_hops: int, is_far: bool
) -> tuple[float, float, float]:
    """Seconds of one message inside nodes and between nodes, and the host's for all batches of messages."""
    message = messages.message_bytes(num_bytes, num_hops, is_far=is_far)
    host_s = messages.batch_host_s * num_batches(num_bytes, message, num_hops)
    far_s = max(links.far_of_node.time_s(message), links.far_of_device.time_s(message))
    return links.near.time_s(message), far_s, host_s


def transfer_times(
    links: LinkSet, traffic: TransferTraffic, expert_bytes: int, messages: MessageRule
) -> LinkTimes:
    """Seconds of one SparseAllGather: the busiest links, and one message for each hop before the last.

    This is the volume bound of Hecate, Eq. 1, applied to every link of the plan. SparseReduceScatter is the
    transpose. ``expert_bytes`` are those of an expert, or of its gradient.
    """
    is_far = traffic.num_between_nodes > 0
    near_s, far_s, host_s = _message_seconds(links, expert_bytes, messages, traffic.num_hops, is_far)
    first_s = traffic.fill_hops[0] * near_s + traffic.fill_hops[1] * far_s
    times = links.times(traffic.busiest, expert_bytes)
    near_s, far_s = (max(first_s + s, host_s) if s else 0.0 for s in (times.near_s, times.far_s))
    return LinkTimes(near_s, far_s)


def moving_seconds(old: np.ndarray, new: np.ndarray, topology: Topology, profile: LayerProfile) -> float:
    """Seconds to move experts, with their states, from old to new devices, integers of one shape.

    They move between iterations, each in one hop.
    """
    moves = old != new
    return profile.links.times(moves_traffic(old[moves], new[moves], topology), profile.moved_bytes).seconds


@dataclass(frozen=True, eq=False)
class LayerPrice:
    """Seconds of one layer in an iteration, in both passes, by their cause.

    ``before_s`` is the compute before the layer, such as attention, and ``all_to_all_s`` has router counts,
    dispatches and combines. ``gather_s`` and ``reduce_s`` are those for which compute waits.
    """

    before_s: float
    all_to_all_s: float
    experts_s: float
    gather_s: float
    reduce_s: float

    @property
    def moe_s(self) -> float:
        """All seconds that a placement changes, without the compute before the layer."""
        return self.all_to_all_s + self.experts_s + self.gather_s + self.reduce_s

    @property
    def seconds(self) -> float:
        """All seconds of the layer and of the compute before it."""
        return self.before_s + self.moe_s


@lru_cache(maxsize=64)  # all layers of a model have equal costs
def layer_costs(
    profile: LayerProfile,
    life: ReplicaLife,
    counts_s: float,
    most_hops: int,
    *,
    num_micro_batches: int,
    hides: bool = True,
    early: float = 0.0,
    choices: TokenChoices | None = None,
    units_per_pair: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> LayerCosts:
    """The costs of a layer. The top of this file tells what its price contains.

    Between gate and dispatch of a micro-batch are ``counts_s``. ``hides`` says whether transfers run beside
    compute, and ``early`` is the share of the gather beside the experts of the layer before, which hide it.
    ``choices`` travel with each token in a deduplicated exchange. ``units_per_pair`` are the rows that travel
    for a pair, inside nodes, between nodes, and of one device between nodes.
    """
    cluster, is_summed = profile.cluster, life in (ReplicaLife.ITERATION, ReplicaLife.RESIDENT)
    links = profile.links[:3]
    one_pass_bytes = round(profile.expert_bytes * profile.trained_share)
    sizes = (profile.expert_bytes, profile.reduced_bytes if is_summed else one_pass_bytes)
    # Frozen weights need the gradients of their inputs only.
    backward = BACKWARD_PER_FORWARD * (1 + profile.trained_share) / 2
    exchanges = (
        [
            (starts * link.alpha_s, units * unit_bytes * link.beta_s_per_byte)
            for link, units in zip(links, units_per_pair, strict=True)
        ]
        for unit_bytes, starts in _exchanges(profile.token_bytes, num_micro_batches, choices)
    )
    moves = [(link.alpha_s, *(size * link.beta_s_per_byte for size in sizes)) for link in links]
    of_hops = [
        [
            _message_seconds(profile.links, size, profile.messages, hops, is_far)
            for hops in range(most_hops + 1)
        ]
        for is_far in (False, True)
        for size in sizes
    ]
    dispatch, combine = (np.array(table) for table in exchanges)
    return LayerCosts(
        dispatch,
        combine,
        np.array(moves),
        np.hstack(of_hops),
        per_token_s=(1 + backward) * profile.flops_per_token / cluster.expert_flops_per_s,
        num_micro_batches=num_micro_batches,
        counts_s=counts_s,
        hidden_s=profile.non_moe_s + counts_s if hides else 0.0,
        hidden_back_s=BACKWARD_PER_FORWARD * profile.non_moe_s if hides else 0.0,
        life=life,
        in_turn=_hops_in_turn(choices),
        early=early,
    )
