# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: infer_types=True, annotation_typing=False
"""A layer whose placement changes, what this does to its traffic, and which experts have a part in it."""

import cython
import numpy as np

from megatron_fssdp.planning.arrays import zero_ints, zero_reals
from megatron_fssdp.planning.cost.layer_costs import CostedLayer
from megatron_fssdp.planning.placement.placement import ExpertPlacement

if not cython.compiled:  # the .pxd file imports them for C
    from megatron_fssdp.planning.kernels.constants import HOP_BITS, NO_PAIRS
    from megatron_fssdp.planning.kernels.price_formula import PriceFormula
    from megatron_fssdp.planning.kernels.transfer_trees import TransferTrees


class LayerTraffic(TransferTrees):
    """One layer with a placement that changes, and the traffic of the placement.

    The sums count all experts that are not *out*. Near traffic stays in a node, far traffic crosses nodes. An
    expert's tokens stay on a device that has it; those of other devices go in equal parts to the holders in
    their node, or to all holders if the node has none.

    Attributes:
        load_ED: (token, k) pairs by expert and source device, and ``load_EN`` by source node; ``rest_EN`` are
            those of devices that lack the expert, and ``unserved_E`` those of nodes that lack it.
        slots: Most replicas that a device may hold, and ``used_D`` those that it holds.
        holders_E: Number of holders of each expert, and ``holders_EN`` in each node.
        is_changed_E: 1 for experts whose holders :meth:`put` changed; a descent sets it back.
        work: Pairs that a device computes. ``pairs_in`` and ``pairs_out`` are those that it gets and sends,
            ``moves_in`` and ``moves_out`` the experts. Each has what devices do in their nodes, then each
            node, and from the place ``far_at`` on each device between nodes, if its NIC limits it;
            ``[2 D + N]``. A node gets and sends between nodes.
        held_N: The ``num_held`` nodes that have the expert that was last walked, in the order of the chain.
        own_in, own_out: Experts that a node gets and sends for that expert, ``[N]``; each
            of its holders computes ``each_far`` pairs of nodes without one.
        hops_E: Hops of each expert's longest path; 0 while it is out.
        fill_E: Hops before the last one of that path: those between nodes, shifted, plus those inside.
        is_stale_N: 1 for nodes whose devices changed in the node since ``PricedLayer.price``.
        version: Rises with each change of the sums.
        part_E: Parts of the experts in what :meth:`rank` looks at.
        is_tired_E: 1 for the experts that saved nothing during the present descent.
    """

    def __init__(self, layer: CostedLayer, placement: ExpertPlacement, slots: int) -> None:
        TransferTrees.__init__(self, placement, layer.topology)
        self.load_ED = memoryview(np.array(layer.load_DE.T, order="C"))
        self.load_EN = memoryview(np.array(layer.topology.sum_over_nodes(layer.load_DE).T, order="C"))
        self.slots, self.costs = slots, PriceFormula(layer.costs)
        devices, num_nodes, experts = self.num_devices, self.num_nodes, self.num_experts
        self.total_E, self.unserved_E = zero_reals(experts), zero_reals(experts)
        self.all_pairs = 0.0
        self.holders_E, self.used_D = zero_ints(experts), zero_ints(devices)
        self.hops_E, self.fill_E = zero_ints(experts), zero_ints(experts)
        self.is_changed_E, self.version = zero_ints(experts), 0
        self.holders_EN = memoryview(np.zeros((experts, num_nodes), np.int64))
        self.rest_EN = memoryview(np.array(self.load_EN))
        self.far_at = devices + num_nodes
        places = self.far_at + devices
        self.work, self.pairs_in, self.pairs_out = zero_reals(places), zero_reals(places), zero_reals(places)
        self.moves_in, self.moves_out = zero_reals(places), zero_reals(places)
        self.own_in, self.own_out = zero_reals(num_nodes), zero_reals(num_nodes)
        self.held_N, self.num_held = zero_ints(num_nodes), 0
        self.is_stale_N = memoryview(np.ones(num_nodes, np.int64))
        self.part_E, self.is_tired_E = zero_reals(experts), zero_ints(experts)
        for expert in range(experts):
            for i in range(num_nodes):
                self.total_E[expert] += self.load_EN[expert, i]
            self.all_pairs += self.total_E[expert]
            self.unserved_E[expert] = self.total_E[expert]
            for i in range(devices):
                if self.has_ED[expert, i]:
                    self.put(expert, i, 1)
            self.used_D[self.owner_E[expert]] -= 1
            self.count(expert, 1)

    def walk(self, expert: int) -> None:
        """Find what an expert adds to the places of the nodes that have it, and its longest path."""
        self.each_far = self.unserved_E[expert] / self.holders_E[expert]
        left = self.holders_E[expert]
        self.num_held = 0  # place of the node in the chain between nodes
        node = self.node_D[self.owner_E[expert]]
        self.own_hops = 0
        self.own_fill = 0
        while left > 0:
            num = self.holders_EN[expert, node]
            if num > 0:
                left -= num
                self.held_N[self.num_held] = node
                self.own_in[node] = 1.0 if self.num_held > 0 else 0.0
                self.own_out[node] = 1.0 if left > 0 else 0.0
                depth = 0
                while num >> (depth + 1):
                    depth += 1
                self.own_hops = max(self.own_hops, self.num_held + depth)
                if num > 1:
                    self.own_fill = max(self.own_fill, (self.num_held << HOP_BITS) + depth - 1)
                elif left > 0:
                    self.own_fill = max(self.own_fill, self.num_held << HOP_BITS)
                self.num_held += 1
            node = node + 1 if node + 1 < self.num_nodes else 0

    def rank_of_first(self, expert: int, node: int, at: int) -> int:
        """Place in a node's tree of the node's first holder, if the holders are lined up from ``at`` on."""
        num = self.holders_EN[expert, node]
        for i in range(self.first_N[node], at):
            num -= self.has_ED[expert, self.member_D[i]]
        return num

    def count(self, expert: int, sign: int) -> None:
        """Add an expert to the sums (sign 1), or take it out (sign -1)."""
        self.count_held(expert, sign)
        for node in range(self.num_nodes):
            self.pairs_out[self.num_devices + node] += sign * self.load_EN[expert, node]
        if self.costs.limits_devices:
            for device in range(self.num_devices):
                self.pairs_out[self.far_at + device] += sign * self.load_ED[expert, device]

    def count_held(self, expert: int, sign: int) -> None:
        """Add an expert's holders to the sums (sign 1), or take them out: then all nodes send its pairs."""
        self.walk(expert)
        self.version += 1
        for i in range(self.num_held):
            node = self.held_N[i]
            num = self.holders_EN[expert, node]
            place = self.num_devices + node
            self.pairs_in[place] += sign * (self.each_far * num)
            self.pairs_out[place] -= sign * self.load_EN[expert, node]
            self.moves_in[place] += sign * self.own_in[node]
            self.moves_out[place] += sign * self.own_out[node]
            self.count_in(expert, node, sign)
        self.hops_E[expert] = self.own_hops if sign > 0 else 0
        self.fill_E[expert] = self.own_fill if sign > 0 else 0

    def count_in(self, expert: int, node: int, sign: float) -> None:
        """:meth:`count_held` for the devices of a node; the leader moves experts between nodes."""
        num = self.holders_EN[expert, node]
        share = self.rest_EN[expert, node] / num
        at = self.leader_at(expert, node)
        rank = self.rank_of_first(expert, node, at)
        limits = self.costs.limits_devices
        self.is_stale_N[node] = 1
        for i in range(self.first_N[node], self.first_N[node + 1]):
            if i == at:
                rank = 0
            device = self.member_D[i]
            place = self.far_at + device
            if limits:
                self.pairs_out[place] -= sign * self.load_ED[expert, device]
            if not self.has_ED[expert, device]:
                self.pairs_out[device] += sign * self.load_ED[expert, device]
                continue
            self.work[device] += sign * (self.load_ED[expert, device] + share + self.each_far)
            self.pairs_in[device] += sign * share
            self.moves_in[device] += sign if rank > 0 else 0.0
            self.moves_out[device] += sign * min(max(num - 1 - 2 * rank, 0), 2)
            if limits:
                self.pairs_in[place] += sign * self.each_far
                if rank == 0 or rank == num:
                    self.moves_in[place] += sign * self.own_in[node]
                    self.moves_out[place] += sign * self.own_out[node]
            rank += 1

    def put(self, expert: int, device: int, sign: int) -> None:
        """Give an expert that is out to one more device (sign 1), or take it away (sign -1)."""
        node = self.node_D[device]
        self.has_ED[expert, device] = 1 if sign > 0 else 0
        self.is_changed_E[expert] = 1
        self.used_D[device] += sign
        self.holders_E[expert] += sign
        self.holders_EN[expert, node] += sign
        self.rest_EN[expert, node] -= sign * self.load_ED[expert, device]
        if self.holders_EN[expert, node] == (1 if sign > 0 else 0):
            pairs = self.unserved_E[expert] - sign * self.load_EN[expert, node]
            # Less is the rounding error of a difference.
            self.unserved_E[expert] = pairs if pairs > NO_PAIRS * self.all_pairs else 0.0

    def rank(self, of_links: bool) -> None:
        """Write to ``part_E`` the parts of the busiest device, or of the link whose pairs take longest."""
        at = 0
        is_out = False
        most = -1.0
        for place in range(self.far_at + self.num_devices if of_links else self.num_devices):
            if not of_links:
                if self.work[place] > most:
                    most, at = self.work[place], place
                continue
            kind = 0 if place < self.num_devices else 1 if place < self.far_at else 2
            seconds = self.costs.dispatch[kind, 1] + self.costs.combine[kind, 1]
            if seconds * self.pairs_in[place] > most:
                most, at, is_out = seconds * self.pairs_in[place], place, False
            if seconds * self.pairs_out[place] > most:
                most, at, is_out = seconds * self.pairs_out[place], place, True
        for expert in range(self.num_experts):
            if self.is_tired_E[expert]:
                self.part_E[expert] = 0.0
            else:
                self.part_E[expert] = (
                    self.part_of_link(expert, at, is_out) if of_links else self.part_of(expert, at)
                )

    def part_of(self, expert: int, device: int) -> float:
        """The part of an expert in what a device computes."""
        if not self.has_ED[expert, device]:
            return 0.0
        node = self.node_D[device]
        near = self.rest_EN[expert, node] / self.holders_EN[expert, node]
        return self.load_ED[expert, device] + near + self.unserved_E[expert] / self.holders_E[expert]

    def part_of_link(self, expert: int, place: int, is_out: bool) -> float:
        """The part of an expert in the pairs that a place gets or sends (``is_out``)."""
        device = place if place < self.num_devices else place - self.far_at
        node = self.node_D[device] if device >= 0 else place - self.num_devices
        num = self.holders_EN[expert, node]
        if place < self.num_devices:
            if num == 0 or self.has_ED[expert, device] == is_out:
                return 0.0
            return self.load_ED[expert, device] if is_out else self.rest_EN[expert, node] / num
        if is_out:
            load = self.load_ED[expert, device] if device >= 0 else self.load_EN[expert, node]
            return load if num == 0 else 0.0
        each_far = self.unserved_E[expert] / self.holders_E[expert]
        return each_far * (self.has_ED[expert, device] if device >= 0 else num)

    def largest_part(self) -> int:
        """The expert with the highest ``part_E``; of equal ones the first."""
        largest = 0
        for expert in range(self.num_experts):
            if self.part_E[expert] > self.part_E[largest]:
                largest = expert
        return largest
