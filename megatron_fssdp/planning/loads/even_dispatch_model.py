"""Device loads under even dispatch, updated while a search adds and removes replicas.

The model is that of ``expected_device_load_D``. But when one replica is added or removed, only the loads of
its expert's holders are updated. The model uses plain lists and floats because each update touches few
numbers: calls of numpy on a handful of elements would take most of the time.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


class ExpertShares:
    """How one expert's load is divided among its holders.

    The share of a holder is ``own[d] + near[node] + far``. These are the tokens that the holder itself routes
    to the expert, an even part of the tokens of other devices in its node, and an even part of the tokens of
    all nodes without a holder.

    Attributes:
        own: The expert's load by source device, ``[D]``.
        node_load: The expert's load by source node, ``[N]``.
        total: The expert's load from all nodes together.
        holders: The devices that have the expert, in no particular order.
        holders_in: Number of holders in each node that has one: node -> number.
        near: For each node with a holder, the part of the load of the node's other devices that each of its
            holders gets: node -> load.
        unserved: Load of all nodes without a holder.
        far: Part of ``unserved`` that each holder gets.
        _rest: For each node with a holder, the load of the node's devices that do not have the expert:
            node -> load.
    """

    __slots__ = ("_rest", "far", "holders", "holders_in", "near", "node_load", "own", "total", "unserved")

    def __init__(
        self,
        own: Sequence[float],
        node_load: Sequence[float],
        total: float,
        holders: list[int],
        node_of: tuple[int, ...],
    ) -> None:
        self.own = own
        self.node_load = node_load
        self.total = total
        self.holders = holders
        self.unserved = self.far = 0.0
        self.rebuild(node_of)

    def rebuild(self, node_of: tuple[int, ...]) -> None:
        """Recompute all shares from ``holders``.

        Args:
            node_of: Node of every device, ``[D]``.
        """
        own, node_load = self.own, self.node_load
        holders_in: dict[int, int] = {}
        rest: dict[int, float] = {}
        for device in self.holders:
            node = node_of[device]
            if node in rest:
                holders_in[node] += 1
                rest[node] -= own[device]
            else:
                holders_in[node] = 1
                rest[node] = node_load[node] - own[device]
        self.holders_in, self._rest = holders_in, rest
        self.near = rest.copy()
        if len(rest) < len(self.holders):
            for node, count in holders_in.items():
                self.near[node] /= count
        self._share_far()

    def join(self, device: int, node: int) -> None:
        """Add a holder. The result is the same as that of :meth:`rebuild`.

        Args:
            device: The new holder.
            node: Node of the new holder.
        """
        self.holders.append(device)
        if node in self.holders_in:
            count = self.holders_in[node] = self.holders_in[node] + 1
            rest = self._rest[node] = self._rest[node] - self.own[device]
            self.near[node] = rest / count
            self.far = self.unserved / len(self.holders)
        else:
            self.holders_in[node] = 1
            self.near[node] = self._rest[node] = self.node_load[node] - self.own[device]
            self._share_far()

    def _share_far(self) -> None:
        """Recompute the load of nodes without a holder, and the part of it that each holder gets."""
        node_load, holders_in = self.node_load, self.holders_in
        if len(holders_in) == len(node_load):
            self.unserved = self.far = 0.0
        else:
            self.unserved = max(0.0, self.total - sum([node_load[node] for node in holders_in]))
            self.far = self.unserved / len(self.holders)


class EvenDispatchModel:
    """Loads of all devices under a placement that changes one replica at a time.

    The model starts without replicas. Loads are numbers of (token, k) pairs.

    Attributes:
        node_of: Node of every device, ``[D]``.
        total: Load of every expert, ``[E]``.
        loads: Modelled load of every device, ``[D]``.
        mean: Mean device load. It is the same under every placement.
        ascending: (load, device) of every device, sorted. It is out of date between :meth:`spread` and
            :meth:`sort_loads`.
        owners: Owner of every expert, ``[E]``.
        owned: For each device, the experts that it owns.
        replicas: For each device, the experts of its replicas, ascending.
        holders: For each expert, its holders, the owner first.
        num_replicated: Number of experts that have replicas now.
        most_replicated: Largest value that ``num_replicated`` has had.
    """

    def __init__(
        self, owner_E: np.ndarray, load_DE: np.ndarray, node_load_NE: np.ndarray, topology: Topology
    ) -> None:
        num_devices = topology.num_devices
        self.node_of = topology.node_of_device
        self._load_DE = load_DE
        self._node_load: list[list[float]] = node_load_NE.T.tolist()
        self.total: list[float] = node_load_NE.sum(axis=0).tolist()
        self.owners: list[int] = owner_E.tolist()
        self._shares: list[ExpertShares | None] = [None] * len(self.owners)
        self.holders = [[owner] for owner in self.owners]
        self.replicas: list[list[int]] = [[] for _ in range(num_devices)]
        self.owned: list[list[int]] = [[] for _ in range(num_devices)]
        self.loads = loads = [0.0] * num_devices
        for expert, (owner, total) in enumerate(zip(self.owners, self.total, strict=True)):
            self.owned[owner].append(expert)
            loads[owner] += total
        self.mean = sum(loads) / num_devices
        self.num_replicated = self.most_replicated = 0
        self.sort_loads()

    def spread_like(self, placement: ExpertPlacement) -> None:
        """Give every expert the replicas that it has in a placement with the same owners.

        No expert may have replicas before.
        """
        replicas_ED = placement.present_ED.copy()
        replicas_ED[np.arange(placement.num_experts), placement.owner_E] = False
        devices_of: dict[int, list[int]] = {}
        for expert, device in zip(*(index_P.tolist() for index_P in np.nonzero(replicas_ED)), strict=True):
            devices_of.setdefault(expert, []).append(device)
        for expert, devices in devices_of.items():
            self.spread(expert, devices)
        self.sort_loads()

    def spread(self, expert: int, devices: list[int]) -> None:
        """Give all its replicas at once to an expert that has none yet.

        Call :meth:`sort_loads` after the last call of this method.

        Args:
            expert: The expert.
            devices: Devices of the replicas, one or more, without the owner.
        """
        loads, node_of = self.loads, self.node_of
        holders = self.holders[expert]
        loads[holders[0]] -= self.total[expert]
        holders += devices
        self._shares[expert] = None  # They may have been computed when the owner was the only holder.
        shares = self.shares(expert)
        own, near, far = shares.own, shares.near, shares.far
        for holder in holders:
            loads[holder] += own[holder] + near[node_of[holder]] + far
        for device in devices:
            insort(self.replicas[device], expert)
        self._count_replicated()

    def sort_loads(self) -> None:
        """Sort the loads, so that ``ascending`` is up to date."""
        self.ascending = sorted(zip(self.loads, range(len(self.loads)), strict=True))

    def shares(self, expert: int) -> ExpertShares:
        """The shares of one expert, computed at the first call."""
        shares = self._shares[expert]
        if shares is None:
            shares = self._shares[expert] = ExpertShares(
                self._load_DE[:, expert].tolist(),
                self._node_load[expert],
                self.total[expert],
                self.holders[expert],
                self.node_of,
            )
        return shares

    def share_on(self, expert: int, device: int) -> float:
        """The part of an expert's load that one of its holders computes."""
        if len(self.holders[expert]) == 1:
            return self.total[expert]
        shares = self.shares(expert)
        return shares.own[device] + shares.near[self.node_of[device]] + shares.far

    def most_loaded(self) -> tuple[float, int]:
        """The highest device load, and the device with the highest number that has it."""
        return self.ascending[-1]

    def add(self, expert: int, device: int) -> None:
        """Add a replica of an expert on a device that does not have the expert."""
        shares, node = self.shares(expert), self.node_of[device]
        if len(shares.holders) == 1:
            self._count_replicated()
        insort(self.replicas[device], expert)
        near, far = shares.near.get(node, 0.0), shares.far
        shares.join(device, node)
        gained = shares.own[device] + shares.near[node] + shares.far
        self._set_load(device, self.loads[device] + gained)
        self._change_others(shares, shares.near[node] - near, shares.far - far, device)

    def remove(self, expert: int, device: int) -> None:
        """Remove the replica of an expert from a device."""
        shares, node = self.shares(expert), self.node_of[device]
        self.replicas[device].remove(expert)
        near, far = shares.near[node], shares.far
        lost = shares.own[device] + near + far
        shares.holders.remove(device)
        shares.rebuild(self.node_of)
        self._set_load(device, self.loads[device] - lost)
        self._change_others(shares, shares.near.get(node, 0.0) - near, shares.far - far, device)
        self.num_replicated -= len(shares.holders) == 1

    def _change_others(
        self, shares: ExpertShares, growth_near: float, growth_far: float, device: int
    ) -> None:
        """Update the loads of an expert's other holders after one device has got or lost the expert.

        Args:
            shares: The expert's shares after the change.
            growth_near: By how much the share of each holder in the device's node grew, from tokens of this
                node.
            growth_far: By how much the share of each holder grew, from tokens of nodes without a holder.
            device: The device that has got or lost the expert.
        """
        loads, node_of = self.loads, self.node_of
        changed_node = node_of[device]
        for holder in shares.holders:
            growth = growth_far
            if node_of[holder] == changed_node:
                if holder == device:
                    continue
                growth += growth_near
            if growth:
                self._set_load(holder, loads[holder] + growth)

    def _count_replicated(self) -> None:
        """Count one more expert that has replicas."""
        self.num_replicated += 1
        self.most_replicated = max(self.most_replicated, self.num_replicated)

    def _set_load(self, device: int, load: float) -> None:
        """Set the load of a device and keep ``ascending`` sorted."""
        ascending = self.ascending
        del ascending[bisect_left(ascending, (self.loads[device], device))]
        insort(ascending, (load, device))
        self.loads[device] = load

    def present_ED(self) -> np.ndarray:
        """Whether each expert is present on each device now, bool ``[E, D]``."""
        num_devices = len(self.loads)
        present_ED = np.zeros((len(self.holders), num_devices), dtype=np.bool_)
        flat_P = [
            first + device
            for first, holders in zip(range(0, present_ED.size, num_devices), self.holders, strict=True)
            for device in holders
        ]
        present_ED.reshape(-1)[flat_P] = True
        return present_ED
