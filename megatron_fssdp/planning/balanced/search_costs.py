"""Costs of a layer as the replica search gets them: flat arrays, in which every formula is worked out.

Positions and meanings are in ``planning/kernels/parts/layer_price.py``.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD, LinkCost
from megatron_fssdp.planning.cost.deduplicated_traffic import tokens_per_pair
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import DISPATCH_STARTS, PROB_BYTES, counts_seconds
from megatron_fssdp.planning.cost.link_seconds import plain_links
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import gather_stages, num_batches, reduction_stages

NUM_COSTS, NUM_HOP_COSTS = 19, 6

TRANSFER_OVER_LOAD = 5e-4
"""Cost of one more expert on a link where no costs are measured, as a part of the mean device load.

The search then lowers the highest device load. This small cost leaves out replicas that hardly lower it.
"""


@dataclass(frozen=True, eq=False)
class SearchCosts:
    """Costs of one layer.

    Attributes:
        layer: Costs of links and compute, float64.
        hops: Costs of transfers for each number of hops, float64.
        counts_s: Seconds of the router counts of an iteration, which the search leaves out.
    """

    layer: np.ndarray
    hops: np.ndarray
    counts_s: float

    @classmethod
    def of_loads(cls, topology: Topology, mean_load: float) -> "SearchCosts":
        """Costs with which a layer takes as long as the highest device load says.

        Args:
            topology: Nodes of the devices.
            mean_load: Mean load of a device.
        """
        layer = np.zeros(NUM_COSTS)
        layer[8] = layer[9] = 1.0
        layer[12:14] = TRANSFER_OVER_LOAD * mean_load
        return cls(layer, np.zeros(NUM_HOP_COSTS * (_most_hops(topology) + 1)), 0.0)

    @classmethod
    def of_profile(
        cls,
        profile: LayerProfile,
        topology: Topology,
        num_experts: int,
        *,
        rematerialize: bool,
        hides: bool,
    ) -> "SearchCosts":
        """Measured costs, with which a layer takes the seconds of :func:`layer_seconds`.

        Args:
            profile: Measured costs of the layer and the links.
            topology: Nodes of the devices.
            num_experts: Number of experts, E.
            rematerialize: Whether every micro-batch gathers replicas twice and reduces their gradients once.
            hides: Whether transfers run beside compute.
        """
        cluster, times = profile.cluster, profile.num_micro_batches
        links = plain_links(cluster)
        rows, moves = links.all_to_all, links.transfer
        near, far = moves.near, moves.far_of_node
        counts_s = counts_seconds(profile, topology, num_experts)
        row_bytes = profile.token_bytes / times
        sent_bytes = (profile.token_bytes + PROB_BYTES) / times
        of_near, of_far = 1.0, 1.0
        if (choices := profile.sent_choices) is not None:
            of_near, of_far = tokens_per_pair(topology, num_experts, choices)
        reduced_bytes = profile.expert_bytes if rematerialize else profile.reduced_bytes
        layer = [
            *_line(rows.near, DISPATCH_STARTS, of_near * sent_bytes),
            *_line(rows.far_of_node, DISPATCH_STARTS, of_far * sent_bytes),
            *_line(rows.near, 1, of_near * row_bytes),
            *_line(rows.far_of_node, 1, of_far * row_bytes),
            (1 + BACKWARD_PER_FORWARD) * profile.flops_per_token / cluster.expert_flops_per_s,
            times,
            near.alpha_s,
            far.alpha_s,
            profile.expert_bytes * near.beta_s_per_byte,
            profile.expert_bytes * far.beta_s_per_byte,
            reduced_bytes * near.beta_s_per_byte,
            reduced_bytes * far.beta_s_per_byte,
            profile.non_moe_s + counts_s if hides else 0.0,
            BACKWARD_PER_FORWARD * profile.non_moe_s if hides else 0.0,
            float(rematerialize),
        ]
        hops = np.arange(1, _most_hops(topology) + 1)
        of_hops = np.zeros((len(hops) + 1, NUM_HOP_COSTS))
        for first, num_bytes, stages in (
            (0, profile.expert_bytes, gather_stages(hops)),
            (3, reduced_bytes, reduction_stages(hops)),
        ):
            message = profile.messages.message_bytes(np.full(len(hops), num_bytes), stages)
            of_hops[1:, first] = near.time_s(message)
            of_hops[1:, first + 1] = far.time_s(message)
            of_hops[1:, first + 2] = profile.messages.batch_host_s * num_batches(num_bytes, message, hops)
        return cls(np.array(layer, np.float64), of_hops.reshape(-1), times * counts_s)


def _line(link: LinkCost, starts: int, num_bytes: float) -> tuple[float, float]:
    """Start-up seconds of a collective, and its seconds for each pair of ``num_bytes``."""
    return starts * link.alpha_s, num_bytes * link.beta_s_per_byte


def _most_hops(topology: Topology) -> int:
    """Most hops of a path: one for each other node, and in a node the depth of a tree over its devices."""
    return topology.num_nodes + topology.num_devices.bit_length()
