"""Exact quotas: the lowest load that all devices can be kept at, from the counts of one micro-batch.

Ours, after the approach of ECHO and UltraEP: with the counts known, a bound on every device's load is
searched, what is above it spills to devices with room, and tokens follow that assignment.

Shape letters: E experts, D devices, N nodes, X expert-tensor-parallel peers.
"""

import numpy as np

from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.loads.checked_loads import checked_counts
from megatron_fssdp.planning.placement.topology import Topology

CEILING_TOLERANCE = 0.005
"""How exactly the lowest ceiling is searched for, as a part of the mean load."""


def quota_assignment(
    owner_E: np.ndarray, counts_DE: np.ndarray, topology: Topology, *, slots: int
) -> np.ndarray:
    """How many tokens of each expert each device computes.

    A binary search for the smallest ceiling of all devices' loads that can be kept with at most
    ``slots`` other experts on a device. What an owner has above the ceiling is taken from its hottest
    experts first and spills to devices with room: such that have the expert already first, then those
    of the nodes that most of the expert's tokens come from, then the lowest.

    Args:
        owner_E: Owner of every expert, integers [E].
        counts_DE: (token, k) pairs by source and expert, integers [D, E].
        topology: Nodes of the devices.
        slots: Most experts that a device may take over, m.

    Returns:
        int64 [E, D]; row ``e`` sums to the expert's tokens.
    """
    owner = np.asarray(owner_E, dtype=np.int64)
    counts = checked_counts(counts_DE, topology.num_devices, len(owner))
    if slots < 0:
        raise ValueError(f"slots is {slots}: wanted 0 or more; 0 means that nothing spills")
    load_E = counts.sum(axis=0)
    search = _Spilling(owner, load_E, topology.sum_over_nodes(counts), topology, slots)
    load_D = search.loads
    low, high = -(-int(load_E.sum()) // topology.num_devices), max(load_D)
    found: list[tuple[int, int, int]] = []
    ceiling = low
    while low < high:
        spilled = search.below(ceiling)
        if spilled is None:
            low = ceiling + 1
        else:
            found, high = spilled, ceiling
        if high - low <= CEILING_TOLERANCE * load_E.sum() / topology.num_devices:
            break
        ceiling = (low + high) // 2
    tokens_ED = np.zeros((len(owner), topology.num_devices), np.int64)
    tokens_ED[np.arange(len(owner)), owner] = load_E
    for expert, device, tokens in found:
        tokens_ED[expert, device] += tokens
        tokens_ED[expert, owner[expert]] -= tokens
    return tokens_ED


class _Spilling:
    """What spills where under a ceiling; plain lists, because few numbers are touched at a time."""

    def __init__(
        self, owner_E: np.ndarray, load_E: np.ndarray, load_NE: np.ndarray, topology: Topology, slots: int
    ) -> None:
        self.loads: list[int] = (
            np.bincount(owner_E, weights=load_E, minlength=topology.num_devices).astype(np.int64).tolist()
        )
        self._slots = slots
        self._load_of: list[int] = load_E.tolist()
        hottest = np.argsort(-load_E, kind="stable")
        self._owned: list[list[int]] = [[] for _ in self.loads]
        for expert, device in zip(hottest.tolist(), owner_E[hottest].tolist(), strict=True):
            self._owned[device].append(expert)
        self._busiest_first = sorted(range(len(self.loads)), key=lambda device: -self.loads[device])
        self._load_NE, self._node_D = load_NE, topology.node_of_device_D
        self._nearest: dict[int, list[int]] = {}

    def below(self, ceiling: int) -> list[tuple[int, int, int]] | None:
        """(expert, device, tokens) that spill; None if they do not find room."""
        room = [ceiling - load for load in self.loads]
        left = [self._slots] * len(room)
        spilled = []
        for busy in self._busiest_first:
            over = -room[busy]
            if over <= 0:
                break
            for expert in self._owned[busy]:
                tokens = min(over, self._load_of[expert])
                over -= tokens
                for device in self._nearest_to(expert):
                    if not tokens:
                        break
                    taken = min(tokens, room[device])
                    if taken > 0 and left[device]:
                        spilled.append((expert, device, taken))
                        room[device] -= taken
                        left[device] -= 1
                        tokens -= taken
                over += tokens
                if not over:
                    break
            if over:
                return None
        return spilled

    def _nearest_to(self, expert: int) -> list[int]:
        """Devices by how many of the expert's tokens their node has, then by number."""
        if expert not in self._nearest:
            order = np.argsort(-self._load_NE[self._node_D, expert], kind="stable")
            self._nearest[expert] = order.tolist()
        return self._nearest[expert]


def split_among_peers(tokens_ED: np.ndarray, load_XE: np.ndarray) -> np.ndarray:
    """The quotas of each expert-tensor-parallel peer's own tokens, int64 [X, E, D].

    Along one line of an expert's tokens, peer after peer, the devices' quotas follow each other.

    Args:
        tokens_ED: Quotas of all peers together.
        load_XE: Tokens of each peer, summing to the quotas.
    """
    quota_end_ED = np.cumsum(tokens_ED, axis=1)
    peer_end_XE = np.cumsum(load_XE, axis=0)
    first_XED = np.maximum((quota_end_ED - tokens_ED)[None], (peer_end_XE - load_XE)[:, :, None])
    last_XED = np.minimum(quota_end_ED[None], peer_end_XE[:, :, None])
    return np.asarray(np.maximum(last_XED - first_XED, 0))


def quota_dispatch(tokens_ED: np.ndarray, counts_DE: np.ndarray, topology: Topology) -> QuotaDispatch:
    """Sources' tokens for given quotas: a device's own first, then its node's, then the others'.

    Args:
        tokens_ED: Tokens of each expert that each device computes, int64 [E, D].
        counts_DE: (token, k) pairs by source and expert, int64 [D, E].
        topology: Nodes of the devices.
    """
    quota_DE = np.ascontiguousarray(tokens_ED.T)
    own_DE = np.minimum(counts_DE, quota_DE)
    open_DE = quota_DE - own_DE
    in_node_NE = np.minimum(topology.sum_over_nodes(open_DE), topology.sum_over_nodes(counts_DE - own_DE))
    # Inside a node the first devices with open quotas take its tokens.
    before_DE = np.zeros_like(open_DE)
    for devices in topology.devices_by_node:
        rows = list(devices)
        before_DE[rows] = np.cumsum(open_DE[rows], axis=0) - open_DE[rows]
    near_DE = np.clip(in_node_NE[topology.node_of_device_D] - before_DE, 0, open_DE)
    return QuotaDispatch(counts_DE, own_DE, near_DE, open_DE - near_DE, topology)
