"""Balanced and unbound dispatch: unequal parts of an expert's tokens for its holders even out device loads.

Both are ours and go beyond the papers. The placement is fixed and the exact counts are known. Even
dispatch would split tokens evenly over holders; balanced dispatch gives more of them to the least loaded
holders. A token never travels farther than under even dispatch: it stays on its device if the expert is
there, otherwise in its node if a holder is there. Only the holder is selected, within the node or among all
holders.

Unbound dispatch gives up that rule. If an expert is on all devices, each of them computes its own tokens of
the expert under the rule, however much else it has to compute.

Every rank must derive the same result, so the search works with whole numbers. The kernel
``planning/kernels/token_levelling.py`` does it.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

import numpy as np

from megatron_fssdp.planning.dispatch.even_dispatch import even_pair_tokens
from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.kernels import token_levelling
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.holder_groups import HolderGroups, holder_groups
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

ENOUGH = 1.005
"""The search stops when the highest device load divided by the mean load is at most this number."""

MOST_DEALS = 256
"""Most redistributions of one search.

The limit bounds the planning time in large groups. Nothing hides this time.
"""

level_tokens = Kernel(token_levelling.level_tokens)


def balanced_dispatch(counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> QuotaDispatch:
    """Start from even dispatch (Hecate §4.4) and redistribute tokens of the most loaded devices.

    Each step takes the tokens of one expert that a most loaded device shares with other holders. It deals
    them out again to the holders that have the least load without them. If these holders have as much load as
    the device, their own shared tokens are redistributed first. The highest device load never rises. The most
    tokens that a device receives from its node, that a device receives from other nodes, and that a node
    receives never rise either. The result is therefore not slower than even dispatch under any cost model.

    Args:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
    """
    even = even_pair_tokens(counts_DE, placement, topology)
    groups = _level(even.own_P, even.near_P, even.far_P, placement, topology)
    pairs = (groups.expert_P, groups.device_P, even.own_P, even.near_P, even.far_P)
    return QuotaDispatch(counts_DE, np.stack(pairs), topology)


def unbound_dispatch(counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> QuotaDispatch:
    """Balanced dispatch in which any holder of an expert may compute any of its tokens.

    Devices with few other tokens also take tokens from devices that have the expert themselves. Device loads
    become more even, and more tokens travel. Each holder's part is filled with the nearest tokens.

    Args:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
    """
    even = even_pair_tokens(counts_DE, placement, topology)
    # Tokens of other nodes may go to any holder, so the search sees only such tokens.
    tokens_P, own_P = even.own_P + even.near_P + even.far_P, np.zeros_like(even.own_P)
    groups = _level(own_P, own_P.copy(), tokens_P, placement, topology, above_even=int(tokens_P.sum()))
    return QuotaDispatch.filled(counts_DE, groups.expert_P, groups.device_P, tokens_P, topology)


def _level(
    own_P: np.ndarray,
    near_P: np.ndarray,
    far_P: np.ndarray,
    placement: ExpertPlacement,
    topology: Topology,
    above_even: int = 0,
) -> HolderGroups:
    """Run the kernel, which changes ``near_P`` and ``far_P``; returns the holders that the pairs belong to.

    Args:
        own_P: Tokens of the holders themselves, int64 ``[P]``.
        near_P: Tokens that holders of one node share, int64 ``[P]``.
        far_P: Tokens that all holders share, int64 ``[P]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
        above_even: Tokens that devices and nodes may receive above the highest numbers of before.
    """
    groups = holder_groups(placement, topology)
    level_tokens(
        own_P,
        near_P,
        far_P,
        groups.expert_P,
        groups.device_P,
        groups.by_node_P,
        groups.by_device_P,
        groups.device_first_D,
        groups.first_E,
        groups.num_holders_E,
        groups.node_first_EN,
        groups.holders_EN,
        topology.node_of_device_D,
        ENOUGH,
        MOST_DEALS,
        above_even,
    )
    return groups
