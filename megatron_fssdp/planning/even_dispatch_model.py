"""Device loads under even dispatch, kept up to date while replicas come and go.

The same model as ``expected_device_load_D``, but one replica's change costs only its
expert's holders. Plain lists and floats: the numbers touched are few, and numpy calls on
a handful of elements would dominate. Shape letters: E experts, D devices, N nodes,
P (expert, holder) pairs.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.replica_routing import expected_device_load_D
from megatron_fssdp.planning.topology import Topology


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
    """

    __slots__ = ("far", "holders", "holders_in", "near", "node_load", "own", "total", "unserved")

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
        self.rebuild(node_of)

    def rebuild(self, node_of: tuple[int, ...]) -> None:
        """Recomputes the shares from ``holders``."""
        own, node_load = self.own, self.node_load
        holders_in: dict[int, int] = {}
        held: dict[int, float] = {}
        for device in self.holders:
            node = node_of[device]
            if node in holders_in:
                holders_in[node] += 1
                held[node] += own[device]
            else:
                holders_in[node] = 1
                held[node] = own[device]
        self.holders_in = holders_in
        self.near = {node: (node_load[node] - held[node]) / count for node, count in holders_in.items()}
        if len(holders_in) == len(node_load):
            self.unserved = 0.0
        else:
            self.unserved = max(0.0, self.total - sum([node_load[node] for node in holders_in]))
        self.far = self.unserved / len(self.holders)


class EvenDispatchModel:
    """Loads of all devices under a placement that changes one replica at a time.

    Attributes:
        loads: Modelled load of every device, [D].
        ascending: (load, device) of every device, sorted.
        replicas: Replicas on every device.
        owned: Experts owned by every device.
        holders: Holders of every expert, owner first.
        num_replicated: How many experts have a replica.
    """

    def __init__(
        self, placement: ExpertPlacement, load_DE: np.ndarray, node_load_NE: np.ndarray, topology: Topology
    ) -> None:
        num_experts, num_devices = placement.num_experts, placement.num_devices
        self.node_of = topology.node_of_device
        self._load_DE = load_DE
        self._node_load_NE = node_load_NE
        self._total: list[float] = node_load_NE.sum(axis=0).tolist()
        self._shares: list[ExpertShares | None] = [None] * num_experts
        self.owners = placement.owner_E.tolist()
        self.owned: list[list[int]] = [[] for _ in range(num_devices)]
        self.replicas: list[list[int]] = [[] for _ in range(num_devices)]
        self.holders: list[list[int]] = []
        for expert, owner in enumerate(self.owners):
            self.owned[owner].append(expert)
            self.holders.append([owner])
        replicas_ED = placement.present_ED.copy()
        replicas_ED[np.arange(num_experts), placement.owner_E] = False
        expert_P, device_P = np.nonzero(replicas_ED)
        for expert, device in zip(expert_P.tolist(), device_P.tolist(), strict=True):
            self.replicas[device].append(expert)
            self.holders[expert].append(device)
        self.num_replicated = sum([len(holders) > 1 for holders in self.holders])
        self.loads = expected_device_load_D(load_DE, placement, topology).tolist()
        self.ascending = sorted(zip(self.loads, range(num_devices), strict=True))

    def shares(self, expert: int) -> ExpertShares:
        """The shares of one expert, computed when first asked for."""
        shares = self._shares[expert]
        if shares is None:
            shares = self._shares[expert] = ExpertShares(
                memoryview(self._load_DE[:, expert]),
                memoryview(self._node_load_NE[:, expert]),
                self._total[expert],
                self.holders[expert],
                self.node_of,
            )
        return shares

    def share_on(self, expert: int, device: int) -> float:
        """An expert's load on one of its holders."""
        shares = self.shares(expert)
        return shares.own[device] + shares.near[self.node_of[device]] + shares.far

    def most_loaded(self) -> tuple[float, int]:
        """The highest load and the lowest device that has it."""
        highest = self.ascending[-1][0]
        return self.ascending[bisect_left(self.ascending, (highest, -1))]

    def add(self, expert: int, device: int) -> None:
        """Makes an expert present on a device without it."""
        self.num_replicated += len(self.holders[expert]) == 1
        insort(self.replicas[device], expert)
        self._change(expert, device, arrives=True)

    def remove(self, expert: int, device: int) -> None:
        """Ends a replica."""
        self.replicas[device].remove(expert)
        self._change(expert, device, arrives=False)
        self.num_replicated -= len(self.holders[expert]) == 1

    def _change(self, expert: int, device: int, *, arrives: bool) -> None:
        shares, node_of = self.shares(expert), self.node_of
        own, near, far = shares.own, shares.near, shares.far
        before = {holder: own[holder] + near[node_of[holder]] + far for holder in shares.holders}
        if arrives:
            shares.holders.append(device)
            before[device] = 0.0
        else:
            shares.holders.remove(device)
            self._set_load(device, self.loads[device] - before.pop(device))
        shares.rebuild(node_of)
        near, far = shares.near, shares.far
        for holder, load_before in before.items():
            load_after = own[holder] + near[node_of[holder]] + far
            if load_after != load_before:
                self._set_load(holder, self.loads[holder] - load_before + load_after)

    def _set_load(self, device: int, load: float) -> None:
        ascending = self.ascending
        del ascending[bisect_left(ascending, (self.loads[device], device))]
        insort(ascending, (load, device))
        self.loads[device] = load

    def present_ED(self) -> np.ndarray:
        """Where every expert is now, bool [E, D]."""
        present_ED = np.zeros((len(self.holders), len(self.loads)), dtype=np.bool_)
        for expert, holders in enumerate(self.holders):
            present_ED[expert, holders] = True
        return present_ED
