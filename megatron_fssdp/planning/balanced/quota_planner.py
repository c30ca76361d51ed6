"""Exact quotas: how many tokens of each expert each device computes, planned from a micro-batch's counts.

This planner is ours and follows the approach of ECHO and UltraEP. The counts are known. A search finds the
lowest limit (ceiling) that the load of every device can have. Tokens above the ceiling spill to devices with
room, and the dispatch follows this assignment.

Shape letters: E experts, D devices, P pairs of expert and device, X expert-tensor-parallel peers.
"""

import numpy as np

from megatron_fssdp.planning.arrays import checked_counts
from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.kernels import quota_search
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.topology import Topology

CEILING_TOLERANCE = 0.005
"""The search for the lowest ceiling stops at this precision, a part of the mean device load."""


spill = Kernel(quota_search.spill)


def quota_assignment(
    owner_E: np.ndarray, counts_DE: np.ndarray, topology: Topology, *, slots: int
) -> np.ndarray:
    """Plan how many tokens of each expert each device computes.

    A binary search finds the lowest ceiling of device loads that is possible with at most ``slots`` experts
    of other owners on a device. An owner above the ceiling spills tokens of its most loaded experts first.
    They go to devices with room, first to those in the nodes from which most of the expert's tokens come,
    then to the device with the lowest number.

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        topology: Nodes of the devices.
        slots: Most experts of other owners that a device may compute, m.

    Returns:
        Tokens by expert and device, int64 ``[E, D]``. Row ``e`` sums to the tokens of expert ``e``.

    Raises:
        ValueError: The counts do not match the owners and devices, or ``slots`` is negative.
    """
    owner = np.asarray(owner_E, dtype=np.int64)
    counts = checked_counts(counts_DE, topology.num_devices, len(owner))
    if slots < 0:
        raise ValueError(f"slots is {slots}: wanted 0 or more; 0 means that nothing spills")
    load_E = counts.sum(axis=0)
    load_D = np.bincount(owner, weights=load_E, minlength=topology.num_devices).astype(np.int64)
    owned_D = np.bincount(owner, minlength=topology.num_devices)
    tokens_ED = np.zeros((len(owner), topology.num_devices), np.int64)
    tokens_ED[np.arange(len(owner)), owner] = load_E
    spill(
        owner,
        load_E,
        load_D,
        topology.sum_over_nodes(counts),
        np.lexsort((-load_E, owner)),
        np.concatenate([[0], np.cumsum(owned_D)]),
        np.argsort(-load_D, kind="stable"),
        topology.node_of_device_D,
        slots,
        CEILING_TOLERANCE,
        np.empty_like(tokens_ED),
        tokens_ED,
    )
    return tokens_ED


def split_among_peers(tokens_ED: np.ndarray, load_XE: np.ndarray) -> np.ndarray:
    """Split quotas among expert-tensor-parallel peers: the quotas for each peer's own tokens.

    An expert's tokens are laid out along a line, peer after peer. The devices' quotas are laid out along the
    same line, device after device. Where they overlap, the tokens of that peer belong to the quota of that
    device.

    Args:
        tokens_ED: Quotas of all peers together, int64 ``[E, D]``.
        load_XE: Tokens of each peer, int64 ``[X, E]``. Their sums over peers equal the sums of the quotas.

    Returns:
        int64 ``[X, E, D]``.
    """
    if len(load_XE) == 1:
        return tokens_ED[None]
    quota_end_ED = np.cumsum(tokens_ED, axis=1)
    peer_end_XE = np.cumsum(load_XE, axis=0)
    first_XED = np.maximum((quota_end_ED - tokens_ED)[None], (peer_end_XE - load_XE)[:, :, None])
    last_XED = np.minimum(quota_end_ED[None], peer_end_XE[:, :, None])
    return np.asarray(np.maximum(last_XED - first_XED, 0))


def quota_dispatch(tokens_ED: np.ndarray, counts_DE: np.ndarray, topology: Topology) -> QuotaDispatch:
    """The dispatch that fulfils given quotas with the nearest tokens (:meth:`QuotaDispatch.filled`).

    Args:
        tokens_ED: Tokens of each expert that each device computes, int64 ``[E, D]``.
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        topology: Nodes of the devices.
    """
    num_devices = topology.num_devices
    pair_P = np.flatnonzero(tokens_ED)
    expert_P, device_P = np.divmod(pair_P, num_devices)
    return QuotaDispatch.filled(counts_DE, expert_P, device_P, tokens_ED.reshape(-1)[pair_P], topology)
