"""The traffic of one layer while replicas come and go: part of the kernel of the replica search.

Tokens are split evenly among holders, without rounding to whole tokens. Experts travel along the trees of
``two_level_transfer``.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import (
    Index,
    Int,
    Ints,
    ReadBytes2,
    ReadInts,
    ReadReals,
    Real,
    Reals,
)
from megatron_fssdp.planning.native.work_arrays import zero_ints, zero_reals

_HOP_BITS = 6  # bits of a number of hops inside a node, which is at most the logarithm of the devices


@cython.cclass
class Layer:
    """The traffic of a layer under a placement that changes.

    The sums count all experts except those that are *out*. Near traffic stays in a node, far traffic crosses
    nodes.

    Attributes:
        slots: Most replicas that a device may hold.
        max_replicated: Most experts that may have replicas.
        load_ED: (token, k) pairs by expert and source device.
        load_EN: Pairs by expert and source node.
        owner_E: Owner of each expert.
        node_D: Node of each device.
        first_N: Position of each node's first device in ``member_D``, and at the end the number of devices.
        member_D: Devices by node, then number; ``place_D`` has the place of each device in its node.
        place_E: Place from which on the leaders of each expert are sought, see ``two_level_transfer``.
        costs: Costs of the layer; ``layer_price.py`` has their positions.
        hop_costs: Costs of transfers for each number of hops.
        total_E: Pairs of each expert.
        present_ED: 1 where a device has an expert.
        holder_ED: Holders of each expert, the owner first; the first ``holders_E`` of a row.
        holders_EN: Number of holders of each expert in each node.
        holders_E: Number of holders of each expert.
        rest_EN: Pairs of the devices of a node without the expert, if the node has a holder.
        unserved_E: Pairs of the nodes without a holder.
        used_D: Number of replicas on each device.
        held_D: Experts whose replicas a device has, ``slots`` places for each device; the first ``used_D``.
        replicated_E: Experts with replicas, the first ``num_replicated``.
        hops_E: Hops of the longest path of each expert's transfer; 0 while an expert is out.
        fill_E: Hops before the last one on the longest path: the far hops, shifted by ``_HOP_BITS``, plus the
            near hops.
        load_D: Pairs that each device computes.
        in_D: Pairs that each device receives from its node; it sends ``out_D`` to its node.
        gets_D: Experts that each device receives from its node; it sends ``sends_D`` to its node.
        far_in_N: Pairs that each node receives from other nodes; it sends ``far_out_N``.
        gets_N: Experts that each node receives from other nodes; it sends ``sends_N``.
        num_replicated: Number of experts with replicas.
        all_pairs: Pairs of all experts.
        plain_ints: What follows the replicas, for owners only: the beginning of ``ints``.
        plain_reals: The same of ``reals``.
        ints: Memory of all work arrays of integers, of which the first ``num_ints`` are in use.
        reals: Memory of all work arrays of floats, of which the first ``num_reals`` are in use.
    """

    num_experts: Index
    num_devices: Index
    num_nodes: Index
    slots: Int
    max_replicated: Int
    load_ED: ReadReals
    load_EN: ReadReals
    owner_E: ReadInts
    node_D: ReadInts
    first_N: ReadInts
    member_D: ReadInts
    costs: ReadReals
    hop_costs: ReadReals
    place_D: Ints
    place_E: Ints
    total_E: Reals
    present_ED: Ints
    holder_ED: Ints
    holders_EN: Ints
    holders_E: Ints
    rest_EN: Reals
    unserved_E: Reals
    used_D: Ints
    held_D: Ints
    replicated_E: Ints
    hops_E: Ints
    fill_E: Ints
    load_D: Reals
    in_D: Reals
    out_D: Reals
    gets_D: Ints
    sends_D: Ints
    far_in_N: Reals
    far_out_N: Reals
    gets_N: Ints
    sends_N: Ints
    num_replicated: Int
    all_pairs: Real
    plain_ints: Ints
    plain_reals: Reals
    ints: Ints
    num_ints: Index
    reals: Reals
    num_reals: Index

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index, slots: Int) -> None:
        self.num_experts, self.num_devices, self.num_nodes = num_experts, num_devices, num_nodes
        self.slots = slots
        num_pairs, in_nodes = num_experts * num_devices, num_experts * num_nodes
        # One allocation of each type: many small ones would take longer than a search of a small layer.
        self.ints = zero_ints(
            3 * num_pairs
            + 2 * in_nodes
            + 14 * num_experts
            + (10 + 3 * slots) * num_devices
            + 6 * num_nodes
            + 1
        )
        self.reals = zero_reals(2 * in_nodes + 5 * num_experts + 8 * num_devices + 5 * num_nodes)
        self.num_ints = self.num_reals = 0
        # What follows the replicas comes first, so that one copy of it brings a placement back.
        self.holders_EN, self.holders_E = self.new_ints(in_nodes), self.new_ints(num_experts)
        self.used_D = self.new_ints(num_devices)
        self.hops_E, self.fill_E = self.new_ints(num_experts), self.new_ints(num_experts)
        self.gets_D, self.sends_D = self.new_ints(num_devices), self.new_ints(num_devices)
        self.gets_N, self.sends_N = self.new_ints(num_nodes), self.new_ints(num_nodes)
        self.rest_EN, self.unserved_E = self.new_reals(in_nodes), self.new_reals(num_experts)
        self.load_D = self.new_reals(num_devices)
        self.in_D, self.out_D = self.new_reals(num_devices), self.new_reals(num_devices)
        self.far_in_N, self.far_out_N = self.new_reals(num_nodes), self.new_reals(num_nodes)
        self.plain_ints, self.plain_reals = self.new_ints(self.num_ints), self.new_reals(self.num_reals)
        self.place_D, self.place_E = self.new_ints(num_devices), self.new_ints(num_experts)
        self.total_E = self.new_reals(num_experts)
        self.present_ED, self.holder_ED = self.new_ints(num_pairs), self.new_ints(num_pairs)
        self.held_D, self.replicated_E = self.new_ints(slots * num_devices), self.new_ints(num_experts)
        self.num_replicated = 0
        self.all_pairs = 0.0

    @cython.cfunc
    def new_ints(self, size: Index) -> Ints:
        """The next part of ``ints``: zeros."""
        first = self.num_ints
        self.num_ints += size
        return self.ints[first : first + size]

    @cython.cfunc
    def new_reals(self, size: Index) -> Reals:
        """The next part of ``reals``: zeros."""
        first = self.num_reals
        self.num_reals += size
        return self.reals[first : first + size]

    @cython.inner
    def put_on_owners(self) -> cython.void:
        """Put every expert on its owner; all experts are out."""
        for node in range(self.num_nodes):
            for i in range(self.first_N[node], self.first_N[node + 1]):
                self.place_D[self.member_D[i]] = i - self.first_N[node]
        for expert in range(self.num_experts):
            for n in range(self.num_nodes):
                at = expert * self.num_nodes + n
                self.rest_EN[at] = self.load_EN[at]
                self.total_E[expert] += self.load_EN[at]
            self.all_pairs += self.total_E[expert]
            self.unserved_E[expert] = self.total_E[expert]
            owner: Index = self.owner_E[expert]
            self.place_E[expert] = self.place_D[owner] + self.gets_D[owner]
            self.gets_D[owner] += 1  # counts owned experts until the end of this method
            self.put(expert, owner)
            self.used_D[owner] -= 1
        for device in range(self.num_devices):
            self.gets_D[device] = 0

    @cython.inner
    def fill(self) -> cython.void:
        """Put every expert on its owner and count it."""
        self.put_on_owners()
        for expert in range(self.num_experts):
            self.count(expert, 1)
        self.plain_ints[:] = self.ints[: self.plain_ints.shape[0]]
        self.plain_reals[:] = self.reals[: self.plain_reals.shape[0]]

    @cython.inner
    def fill_with(self, present_ED: ReadBytes2) -> cython.void:
        """Put every expert on its owner and where ``present_ED`` is 1, and count it."""
        self.put_on_owners()
        for expert in range(self.num_experts):
            for device in range(self.num_devices):
                if present_ED[expert, device] and self.owner_E[expert] != device:
                    self.put(expert, device)
            self.count(expert, 1)

    @cython.inner
    def clear_all(self) -> cython.void:
        """Take all replicas away."""
        for n in range(self.num_replicated):
            row = self.replicated_E[n] * self.num_devices
            for i in range(1, self.holders_E[self.replicated_E[n]]):
                self.present_ED[row + self.holder_ED[row + i]] = 0
        self.ints[: self.plain_ints.shape[0]] = self.plain_ints
        self.reals[: self.plain_reals.shape[0]] = self.plain_reals
        self.num_replicated = 0

    @cython.inner
    def put(self, expert: Index, device: Index) -> cython.void:
        """Give an expert that is out to one more device."""
        node: Index = self.node_D[device]
        at = expert * self.num_nodes + node
        if self.holders_EN[at] == 0:
            self.unserved_E[expert] -= self.load_EN[at]
        row = expert * self.num_devices
        self.rest_EN[at] -= self.load_ED[row + device]
        self.present_ED[row + device] = 1
        self.holder_ED[row + self.holders_E[expert]] = device
        self.holders_EN[at] += 1
        self.holders_E[expert] += 1
        if self.slots > 0:
            self.held_D[device * self.slots + self.used_D[device]] = expert
        self.used_D[device] += 1
        if self.holders_E[expert] == 2:
            self.replicated_E[self.num_replicated] = expert
            self.num_replicated += 1

    @cython.inner
    def drop(self, expert: Index, device: Index) -> cython.void:
        """Take a replica of an expert that is out from a device."""
        node: Index = self.node_D[device]
        at = expert * self.num_nodes + node
        row = expert * self.num_devices
        self.present_ED[row + device] = 0
        self.rest_EN[at] += self.load_ED[row + device]
        self.holders_EN[at] -= 1
        self.holders_E[expert] -= 1
        self.used_D[device] -= 1
        i: Index = device * self.slots
        while self.held_D[i] != expert:
            i += 1
        self.held_D[i] = self.held_D[device * self.slots + self.used_D[device]]
        if self.holders_EN[at] == 0:
            self.unserved_E[expert] += self.load_EN[at]
        if self.holders_E[expert] == 1:
            self.num_replicated -= 1
            i = 0
            while self.replicated_E[i] != expert:
                i += 1
            self.replicated_E[i] = self.replicated_E[self.num_replicated]
        i = row
        while self.holder_ED[i] != device:
            i += 1
        end = row + self.holders_E[expert]
        while i < end:
            self.holder_ED[i] = self.holder_ED[i + 1]
            i += 1

    @cython.inner
    def count(self, expert: Index, sign: Int) -> cython.void:
        """Add the traffic of an expert with its present holders to the sums, or subtract it."""
        far = self.unserved_E[expert] / self.holders_E[expert]
        self.count_pairs(expert, far, sign)
        hops: Int = 0
        fill: Int = 0
        position: Int = 0  # place of the node in the chain between nodes, which begins at the owner
        left = self.holders_E[expert]
        node: Index = self.node_D[self.owner_E[expert]]
        for _ in range(self.num_nodes):
            at = expert * self.num_nodes + node
            count = self.holders_EN[at]
            if count == 0:
                self.far_out_N[node] += sign * self.load_EN[at]
            else:
                left -= count
                self.far_in_N[node] += sign * far * count
                if position > 0:
                    self.gets_N[node] += sign
                if left > 0:
                    self.sends_N[node] += sign
                if count > 1:
                    self.count_tree(expert, node, sign)
                hops = max(hops, self.hops_to(position, count))
                fill = max(fill, self.fill_to(position, count, left))
                position += 1
            node = node + 1 if node + 1 < self.num_nodes else 0
        self.hops_E[expert] = hops if sign > 0 else 0
        self.fill_E[expert] = fill if sign > 0 else 0

    @cython.inner
    def count_pairs(self, expert: Index, far: Real, sign: Int) -> cython.void:
        """Add the pairs that devices compute and exchange in their nodes to the sums, or subtract them.

        Args:
            expert: The expert.
            far: Pairs of other nodes that each holder computes.
            sign: 1 to add, -1 to subtract.
        """
        row = expert * self.num_devices
        weight: Real = sign
        for node in range(self.num_nodes):
            if self.holders_EN[expert * self.num_nodes + node]:
                for i in range(self.first_N[node], self.first_N[node + 1]):
                    device: Index = self.member_D[i]
                    self.out_D[device] += weight * self.load_ED[row + device]
        for i in range(self.holders_E[expert]):
            holder: Index = self.holder_ED[row + i]
            at = expert * self.num_nodes + self.node_D[holder]
            own = self.load_ED[row + holder]
            share = self.rest_EN[at] / self.holders_EN[at]
            self.load_D[holder] += weight * (own + share + far)
            self.in_D[holder] += weight * share
            self.out_D[holder] -= weight * own

    @cython.inner
    def hops_to(self, position: Int, count: Int) -> Int:
        """Hops of a transfer to the last of ``count`` holders in the node at a position of the chain."""
        depth: Int = 0
        while count >> (depth + 1):
            depth += 1
        return position + depth

    @cython.inner
    def fill_to(self, position: Int, count: Int, left: Int) -> Int:
        """Hops before the last one, in the form of ``fill_E``; ``left`` holders are in later nodes."""
        if count == 1:
            return position << _HOP_BITS if left > 0 else 0
        return (position << _HOP_BITS) + self.hops_to(position, count) - position - 1

    @cython.inner
    def leader_place(self, expert: Index, node: Index) -> Index:
        """Position in ``member_D`` from which on the leader of an expert in a node is sought."""
        owner: Index = self.owner_E[expert]
        first: Index = self.first_N[node]
        place: Index = self.place_D[owner] if self.node_D[owner] == node else self.place_E[expert]
        return first + place % (self.first_N[node + 1] - first)

    @cython.inner
    def count_tree(self, expert: Index, node: Index, sign: Int) -> cython.void:
        """Add the experts that holders of an expert pass on in a node to the sums, or subtract them.

        They pass them on in a binary tree, in cyclic order from the leader on.
        """
        row = expert * self.num_devices
        first: Index = self.first_N[node]
        end: Index = self.first_N[node + 1]
        children = self.holders_EN[expert * self.num_nodes + node] - 1
        is_first: Int = 1
        at: Index = self.leader_place(expert, node)
        for _ in range(end - first):
            device: Index = self.member_D[at]
            if self.present_ED[row + device]:
                if is_first == 0:
                    self.gets_D[device] += sign
                if children > 0:
                    self.sends_D[device] += sign * min(children, 2)
                children -= 2
                is_first = 0
            at = at + 1 if at + 1 < end else first
