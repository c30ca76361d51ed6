"""Device loads under even dispatch, kept up to date while replicas come and go.

The same model as ``expected_device_load_D``, but one replica's change costs only its
expert's holders. Plain lists and floats: the numbers touched are few, and numpy calls on
a handful of elements would dominate.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


class ExpertShares:
    """How one expert's load falls on its holders.

    A holder's share is ``own[d] + near[node] + far``: what it routes to the expert itself,
    an even part of its node's load that is not at a holder, and an even part of the load of
    the nodes without a holder.

    Attributes:
        own: Load by source device, [D].
        node_load: Load by source node, [N].
        total: Load of all nodes.
        holders: The devices with the expert, in no particular order.
        holders_in: Number of holders by node, for the nodes that have one.
        near: Share of the node's other load, for the nodes that have a holder.
        unserved: Load of the nodes without a holder.
        far: Share of it, one a holder.
        _rest: The node's load that is not at a holder, for the nodes that have one.
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
        """Recomputes the shares from ``holders``."""
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
        """Gives a device the expert; the same numbers as from :meth:`rebuild`."""
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
        node_load, holders_in = self.node_load, self.holders_in
        if len(holders_in) == len(node_load):
            self.unserved = self.far = 0.0
        else:
            self.unserved = max(0.0, self.total - sum([node_load[node] for node in holders_in]))
            self.far = self.unserved / len(self.holders)


class EvenDispatchModel:
    """Loads of all devices under a placement that changes one expert at a time.

    Starts with the owners alone.

    Attributes:
        node_of: Node of every device.
        total: Load of every expert, [E].
        loads: Modelled load of every device, [D].
        mean: Mean of it, whatever the placement.
        ascending: (load, device) of every device, sorted; stale after :meth:`spread` until
            :meth:`sort_loads`.
        owners: Owner of every expert.
        owned: Experts owned by every device.
        replicas: Replicas on every device.
        holders: Holders of every expert, owner first.
        num_replicated: How many experts have a replica.
        most_replicated: The most that had one at a time.
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
        """Gives every expert the replicas it has in a placement with the same owners."""
        replicas_ED = placement.present_ED.copy()
        replicas_ED[np.arange(placement.num_experts), placement.owner_E] = False
        devices_of: dict[int, list[int]] = {}
        for expert, device in zip(*(index_P.tolist() for index_P in np.nonzero(replicas_ED)), strict=True):
            devices_of.setdefault(expert, []).append(device)
        for expert, devices in devices_of.items():
            self.spread(expert, devices)
        self.sort_loads()

    def spread(self, expert: int, devices: list[int]) -> None:
        """Gives an expert without replicas all its replicas at once; call :meth:`sort_loads` after the last.

        Args:
            expert: The expert.
            devices: One or more devices, without the owner.
        """
        loads, node_of = self.loads, self.node_of
        holders = self.holders[expert]
        loads[holders[0]] -= self.total[expert]
        holders += devices
        self._shares[expert] = None  # were the owner's alone
        shares = self.shares(expert)
        own, near, far = shares.own, shares.near, shares.far
        for holder in holders:
            loads[holder] += own[holder] + near[node_of[holder]] + far
        for device in devices:
            insort(self.replicas[device], expert)
        self._count_replicated()

    def sort_loads(self) -> None:
        """Brings ``ascending`` up to date."""
        self.ascending = sorted(zip(self.loads, range(len(self.loads)), strict=True))

    def shares(self, expert: int) -> ExpertShares:
        """The shares of one expert, computed when first asked for."""
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
        """An expert's load on one of its holders."""
        if len(self.holders[expert]) == 1:
            return self.total[expert]
        shares = self.shares(expert)
        return shares.own[device] + shares.near[self.node_of[device]] + shares.far

    def most_loaded(self) -> tuple[float, int]:
        """The highest load and the last device that has it."""
        return self.ascending[-1]

    def add(self, expert: int, device: int) -> None:
        """Makes an expert present on a device without it."""
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
        """Ends a replica."""
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
        """Passes on a change of shares to the holders but ``device``, whose presence changed.

        Args:
            shares: As they are now.
            growth_near: What each holder in the device's node has more now, of its node's load.
            growth_far: What each holder has more now, of other nodes' load.
            device: The device.
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
        self.num_replicated += 1
        self.most_replicated = max(self.most_replicated, self.num_replicated)

    def _set_load(self, device: int, load: float) -> None:
        ascending = self.ascending
        del ascending[bisect_left(ascending, (self.loads[device], device))]
        insort(ascending, (load, device))
        self.loads[device] = load

    def present_ED(self) -> np.ndarray:
        """Where every expert is now, bool [E, D]."""
        num_devices = len(self.loads)
        present_ED = np.zeros((len(self.holders), num_devices), dtype=np.bool_)
        flat_P = [
            first + device
            for first, holders in zip(range(0, present_ED.size, num_devices), self.holders, strict=True)
            for device in holders
        ]
        present_ED.reshape(-1)[flat_P] = True
        return present_ED
