"""Balanced dispatch: holders of an expert get unequal parts of its tokens, which evens out device loads.

This dispatch is ours and goes beyond the papers. The placement is fixed and the exact counts are known. Even
dispatch would split tokens evenly over holders; balanced dispatch gives more of them to the least loaded
holders. A token never travels farther than under even dispatch: it stays on its device if the expert is
there, otherwise in its node if a holder is there. Only the holder is selected, within the node or among all
holders.

The module uses plain lists and whole numbers, because it touches few numbers and every rank must derive the
same result.

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
"""The search stops when the highest device load divided by the mean load is at most this number."""

MOST_DEALS = 256
"""Most redistributions of one search.

The limit bounds the planning time to a few milliseconds in large groups. Nothing hides this time.
"""


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
    groups = holder_groups(placement, topology)
    even = even_pair_tokens(counts_DE, placement, topology)
    deals = _Deals(groups, even, topology)
    deals.relieve_all()
    own_DE, near_DE, far_DE = np.zeros((3, *counts_DE.shape), dtype=np.int64)
    for tokens_DE, tokens_P in ((own_DE, even.own_P), (near_DE, deals.near), (far_DE, deals.far)):
        tokens_DE[groups.device_P, groups.expert_P] = tokens_P
    return QuotaDispatch(counts_DE, own_DE, near_DE, far_DE, topology)


class _Deals:
    """Numbers of tokens of every (expert, holder) pair, device and node while tokens are redistributed.

    Attributes:
        near: Tokens of each pair that come from other devices of the holder's node, ``[P]``.
        far: Tokens of each pair that come from other nodes, ``[P]``.
        loads: Tokens that each device computes, ``[D]``.
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
        # No device and no node may receive more than the highest number under even dispatch.
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
        """Find tokens of one expert that any of several holders may compute, and note them for these holders.

        Args:
            tokens_P: Tokens of every pair, near or far ones; int64 ``[P]``.
            order_P: The pairs, ordered so that those that share tokens are consecutive; int64 ``[P]``.
            sizes: Number of consecutive pairs in each group that shares tokens, int64.
            is_far: Whether the tokens come from other nodes.
        """
        firsts = np.cumsum(sizes) - sizes
        shared = np.add.reduceat(np.append(tokens_P[order_P], 0), firsts)
        chosen = (shared > 0) & (sizes > 1)
        for first, size in zip(firsts[chosen].tolist(), sizes[chosen].tolist(), strict=True):
            pairs = order_P[first : first + size].tolist()
            for pair in pairs:
                self._splits_on[self._device_of[pair]].append((is_far, pair, pairs))

    def relieve_all(self) -> None:
        """Lower the highest device load until this is impossible or the load is close to the mean."""
        loads = self.loads
        enough = ENOUGH * sum(loads) / len(loads)
        self._deals_left = MOST_DEALS
        highest = max(loads)
        while highest > enough and self._relieve(loads.index(highest)):
            highest = max(loads)

    def _relieve(self, device: int) -> bool:
        """Lower the load of a device, or of an equally loaded device with which it shares tokens.

        Returns:
            Whether the load of one of these devices became lower.
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
        """Redistribute the tokens that some pairs share, if this lowers the load of a device.

        Args:
            is_far: Whether the tokens come from other nodes.
            pairs: The pairs that share the tokens.
            device: The device whose load should become lower.

        Returns:
            Whether the tokens were redistributed.
        """
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
        """Share tokens out like :func:`level_out`, with a limit on the tokens that each node may receive.

        Args:
            devices: The holders that share the tokens.
            now: Tokens that each holder has of them now.
            loads: Load of each holder without these tokens.
            room: Most of these tokens that each holder may get.

        Returns:
            Tokens that each holder gets.
        """
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
            # A node whose limit is exceeded gets exactly its limit. The other nodes share the rest.
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
    """Sums of the values with equal index, int64 ``[size]``."""
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, index_P, values_P)
    return sums


def level_out(amount: int, loads: Sequence[int], room: Sequence[int]) -> list[int]:
    """Divide an amount into whole parts so that the highest load is as low as possible (water-filling).

    Args:
        amount: The amount to divide, at most ``sum(room)``.
        loads: Load of each receiver before.
        room: Most that each receiver may get, 0 or more.

    Returns:
        Part of each receiver, in the order of ``loads``.
    """
    parts = [0] * len(loads)
    rising = sorted(range(len(loads)), key=loads.__getitem__)
    while amount:
        # Without limits, the receivers below a common level would all be filled up to it. Find these
        # receivers.
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
        # Receivers whose limit is below the level get their limit first. Then the others share the rest.
        for i in full:
            parts[i] = room[i]
            amount -= room[i]
        rising = [i for i in rising if i not in full]
    return parts
