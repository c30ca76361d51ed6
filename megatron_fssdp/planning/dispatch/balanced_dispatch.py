"""Balanced dispatch: the holders of an expert need not get equal parts of the tokens.

Ours, beyond the papers. With the placement fixed and the exact counts known, tokens that
even dispatch would deal out evenly fill up the least loaded holders instead. A token never
goes farther than under even dispatch: it stays on its device where its expert is, else in its
node where a holder is. What is left to choose is the holder, in the node or among all of them.

Plain lists and whole numbers: few numbers are touched, and every rank has to derive the same.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.dispatch.even_dispatch import PairTokens, even_pair_tokens
from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.placement.holder_groups import HolderGroups, holder_groups
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

ENOUGH = 1.005
"""Highest load over the mean from which on nothing is searched any more."""

MOST_DEALS = 256
"""Bounds the time, which nothing hides, to a few milliseconds in large groups."""


def balanced_dispatch(counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> QuotaDispatch:
    """Even dispatch (Hecate §4.4), and then the most loaded devices' tokens dealt out again.

    Deals, one after another, the tokens of one expert that a most loaded device shares with other
    holders to those that have least without them. If its holders have as much as it has, they
    are relieved in turn. The highest load of a device never rises, and neither do the
    most tokens that a device receives from its node or from other nodes, and that a node receives:
    by no cost model is the result slower than even dispatch.

    Args:
        counts_DE: (token, k) pairs by source and expert, integers [D, E].
        placement: Where the experts are.
        topology: Nodes of the devices.
    """
    groups = holder_groups(placement, topology)
    even = even_pair_tokens(counts_DE, placement, topology)
    deals = _Deals(groups, even, topology)
    deals.relieve_all()
    own_DE, near_DE, far_DE = np.zeros((3, *counts_DE.shape), dtype=np.int64)
    for tokens_DE, tokens_P in ((own_DE, even.own_P), (near_DE, deals.near), (far_DE, deals.far)):
        tokens_DE[groups.device_P, groups.expert_P] = tokens_P
    return QuotaDispatch(counts_DE, own_DE, near_DE, far_DE, topology)


class _Deals:
    """Tokens of every device and link while they are dealt out.

    Attributes:
        near: Tokens of each pair from other devices of the holder's node.
        far: Tokens of each pair from other nodes.
        loads: Tokens that each device computes.
    """

    def __init__(self, groups: HolderGroups, even: PairTokens, topology: Topology) -> None:
        device_P = groups.device_P
        self.near: list[int] = even.near_P.tolist()
        self.far: list[int] = even.far_P.tolist()
        self._node_of = topology.node_of_device
        self._device_of: list[int] = device_P.tolist()
        num_devices, num_nodes = topology.num_devices, topology.num_nodes
        near_D, far_D = (_sums(values_P, device_P, num_devices) for values_P in (even.near_P, even.far_P))
        far_N = _sums(far_D, topology.node_of_device_D, num_nodes)
        self.loads: list[int] = (_sums(even.own_P, device_P, num_devices) + near_D + far_D).tolist()
        self._received_near: list[int] = near_D.tolist()
        self._received_far: list[int] = far_D.tolist()
        self._node_received: list[int] = far_N.tolist()
        # None may get above what is highest under even dispatch.
        self._most_near, self._most_far, self._most_of_node = (
            int(near_D.max()),
            int(far_D.max()),
            int(far_N.max()),
        )
        self._splits_on: list[list[tuple[bool, int, list[int]]]] = [[] for _ in range(num_devices)]
        sizes = groups.holders_EN.reshape(-1)
        self._add_splits(even.near_P, groups.by_node_P, sizes, is_far=False)
        self._add_splits(even.far_P, np.arange(device_P.size), groups.num_holders_E, is_far=True)

    def _add_splits(
        self, tokens_P: np.ndarray, order_P: np.ndarray, sizes: np.ndarray, *, is_far: bool
    ) -> None:
        """Tokens of one expert that may go to any of several consecutive pairs."""
        firsts = np.cumsum(sizes) - sizes
        shared = np.add.reduceat(np.append(tokens_P[order_P], 0), firsts)
        chosen = (shared > 0) & (sizes > 1)
        for first, size in zip(firsts[chosen].tolist(), sizes[chosen].tolist(), strict=True):
            pairs = order_P[first : first + size].tolist()
            for pair in pairs:
                self._splits_on[self._device_of[pair]].append((is_far, pair, pairs))

    def relieve_all(self) -> None:
        """Relieve the most loaded device until that is not possible any more, or it has enough."""
        loads = self.loads
        enough = ENOUGH * sum(loads) / len(loads)
        self._deals_left = MOST_DEALS
        highest = max(loads)
        while highest > enough and self._relieve(loads.index(highest)):
            highest = max(loads)

    def _relieve(self, device: int) -> bool:
        """Lower a device's load; where its fellow holders are as loaded, theirs first.

        Returns:
            Whether any load fell that was at the device's level.
        """
        level = self.loads[device]
        seen, waiting = {device}, [device]
        for current in waiting:
            for is_far, own_pair, pairs in self._splits_on[current]:
                if not (self.far if is_far else self.near)[own_pair]:
                    continue
                if not self._deals_left:
                    return False
                self._deals_left -= 1
                if self._deal(is_far, pairs, current):
                    return True
                for pair in pairs:
                    holder = self._device_of[pair]
                    if self.loads[holder] >= level - 1 and holder not in seen:
                        seen.add(holder)
                        waiting.append(holder)
        return False

    def _deal(self, is_far: bool, pairs: list[int], device: int) -> bool:
        """Deal one split's tokens out anew; whether ``device`` has less then."""
        tokens = self.far if is_far else self.near
        received = self._received_far if is_far else self._received_near
        most = self._most_far if is_far else self._most_near
        loads = self.loads
        devices = [self._device_of[pair] for pair in pairs]
        now = [tokens[pair] for pair in pairs]
        without = [loads[d] - count for d, count in zip(devices, now, strict=True)]
        room = [most - received[d] + count for d, count in zip(devices, now, strict=True)]
        dealt = (
            self._level_out_far(devices, now, without, room) if is_far else level_out(sum(now), without, room)
        )
        at = devices.index(device)
        if dealt[at] >= now[at]:
            return False
        for pair, d, count, before in zip(pairs, devices, dealt, now, strict=True):
            tokens[pair] = count
            loads[d] += count - before
            received[d] += count - before
            if is_far:
                self._node_received[self._node_of[d]] += count - before
        return True

    def _level_out_far(
        self, devices: list[int], now: list[int], loads: list[int], room: list[int]
    ) -> list[int]:
        """As :func:`level_out`, with what a node may receive as a bound as well."""
        nodes = [self._node_of[device] for device in devices]
        room_of = {node: self._most_of_node - self._node_received[node] for node in nodes}
        for node, count in zip(nodes, now, strict=True):
            room_of[node] += count
        dealt = [0] * len(devices)
        left, positions = sum(now), list(range(len(devices)))
        while True:
            parts = level_out(left, [loads[i] for i in positions], [room[i] for i in positions])
            sums = dict.fromkeys(room_of, 0)
            for i, part in zip(positions, parts, strict=True):
                dealt[i] = part
                sums[nodes[i]] += part
            # A node with more than it may get gets just that; the rest goes to the others.
            full = {node for node, total in sums.items() if total > room_of[node]}
            if not full:
                return dealt
            for node in full:
                inside = [i for i in positions if nodes[i] == node]
                parts = level_out(room_of[node], [loads[i] for i in inside], [room[i] for i in inside])
                for i, part in zip(inside, parts, strict=True):
                    dealt[i] = part
                left -= room_of[node]
            positions = [i for i in positions if nodes[i] not in full]


def _sums(values_P: np.ndarray, index_P: np.ndarray, size: int) -> np.ndarray:
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, index_P, values_P)
    return sums


def level_out(amount: int, loads: Sequence[int], room: Sequence[int]) -> list[int]:
    """Water-filling: whole parts of ``amount`` after which the highest load is lowest.

    Args:
        amount: What is dealt out; at most ``sum(room)``.
        loads: What is there already.
        room: Most that may be added to each, 0 or more.
    """
    parts = [0] * len(loads)
    rising = sorted(range(len(loads)), key=loads.__getitem__)
    while amount:
        # Who lies below the level that all would reach without bounds.
        total, count = amount, 0
        for i in rising:
            if loads[i] * count >= total:
                break
            total += loads[i]
            count += 1
        level, ones = divmod(total, count)
        below = rising[:count]
        full = {i for i in below if room[i] <= level - loads[i]}
        if not full:
            for turn, i in enumerate(below):
                parts[i] = level + (turn < ones) - loads[i]
            break
        # Who cannot rise any farther is filled up first, for the others may rise higher.
        for i in full:
            parts[i] = room[i]
            amount -= room[i]
        rising = [i for i in rising if i not in full]
    return parts
