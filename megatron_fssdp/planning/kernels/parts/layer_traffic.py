"""The traffic of one layer while replicas come and go: part of the kernel of the replica search.

Tokens are split evenly among holders, without rounding to whole tokens. Experts travel along the trees of
``two_level_transfer``, with one simplification: the leader of an expert in a node stays the device that got
the expert first.

Shape letters: D devices, E experts, N nodes.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, ReadInts, ReadReals, Real, Reals
from megatron_fssdp.planning.native.work_arrays import zero_ints, zero_reals

_HOP_BITS = 6  # bits of a number of hops inside a node, which is at most the logarithm of the devices


@cython.cclass
class Layer:
    """The traffic of a layer under a placement that changes.

    The sums count all experts except one that is *out*; the arrays ``own_…`` have the traffic of that one.
    Near traffic stays in a node, far traffic crosses nodes.

    Attributes:
        slots: Most replicas that a device may hold.
        max_replicated: Most experts that may have replicas.
        load_ED: (token, k) pairs by expert and source device.
        load_EN: Pairs by expert and source node.
        owner_E: Owner of each expert.
        node_D: Node of each device.
        first_N: Position of each node's first device in ``member_D``, and at the end the number of devices.
        member_D: Devices by node, then number; ``position_D`` has the position of each.
        costs: Costs of the layer; ``layer_price.py`` has their positions.
        hop_costs: Costs of transfers for each number of hops.
        total_E: Pairs of each expert.
        present_ED: 1 where a device has an expert.
        holders_EN: Number of holders of each expert in each node.
        leader_EN: Device of each node that gets an expert from another node, or that owns it.
        holders_E: Number of holders of each expert.
        used_D: Number of replicas on each device.
        hops_E: Hops of the longest path of each expert's transfer.
        fill_E: Hops before the last one on the longest path: the far hops, shifted by ``_HOP_BITS``, plus the
            near hops.
        share_EN: Pairs of the other devices of its node that each holder of an expert computes.
        far_E: Pairs of nodes without a holder that each holder of an expert computes.
        load_D: Pairs that each device computes.
        in_D: Pairs that each device receives from its node; it sends ``out_D`` to its node.
        gets_D: Experts that each device receives from its node; it sends ``sends_D`` to its node.
        far_in_N: Pairs that each node receives from other nodes; it sends ``far_out_N``.
        gets_N: Experts that each node receives from other nodes; it sends ``sends_N``.
        most_load_N: Highest ``load_D`` of each node. ``most_near_N`` and ``most_moved_N`` are those of near
            pairs and experts; ``square_load_N`` and ``square_near_N`` are sums of squares.
        is_held_N: 1 for the nodes that have the expert that is out.
        others_hops: Highest ``hops_E`` of the experts that are not out, and ``others_fill`` that of
            ``fill_E``.
        num_replicated: Number of experts with replicas.
        num_prices: Number of prices computed so far.
        all_pairs: Pairs of all experts.
        prepaid_near: Experts on each link inside nodes that cost nothing more; ``prepaid_far`` are those on
            the links between nodes.
        is_smooth: 1 if root mean squares stand for the highest values.
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
    position_D: Ints
    total_E: Reals
    present_ED: Ints
    holders_EN: Ints
    leader_EN: Ints
    holders_E: Ints
    used_D: Ints
    hops_E: Ints
    fill_E: Ints
    share_EN: Reals
    far_E: Reals
    load_D: Reals
    in_D: Reals
    out_D: Reals
    gets_D: Ints
    sends_D: Ints
    far_in_N: Reals
    far_out_N: Reals
    gets_N: Ints
    sends_N: Ints
    most_load_N: Reals
    most_near_N: Reals
    most_moved_N: Ints
    square_load_N: Reals
    square_near_N: Reals
    own_load_D: Reals
    own_in_D: Reals
    own_out_D: Reals
    own_gets_D: Ints
    own_sends_D: Ints
    own_far_in_N: Reals
    own_far_out_N: Reals
    own_gets_N: Ints
    own_sends_N: Ints
    is_held_N: Ints
    own_share_N: Reals
    own_far: Real
    own_hops: Int
    own_fill: Int
    others_hops: Int
    others_fill: Int
    num_replicated: Int
    num_prices: Int
    all_pairs: Real
    prepaid_near: Int
    prepaid_far: Int
    is_smooth: Int

    def __init__(self, num_experts: Index, num_devices: Index, num_nodes: Index) -> None:
        self.num_experts, self.num_devices, self.num_nodes = num_experts, num_devices, num_nodes
        self.position_D = zero_ints(num_devices)
        self.total_E = zero_reals(num_experts)
        self.present_ED = zero_ints(num_experts * num_devices)
        self.holders_EN = zero_ints(num_experts * num_nodes)
        self.leader_EN = zero_ints(num_experts * num_nodes)
        self.holders_E = zero_ints(num_experts)
        self.used_D = zero_ints(num_devices)
        self.hops_E = zero_ints(num_experts)
        self.fill_E = zero_ints(num_experts)
        self.share_EN = zero_reals(num_experts * num_nodes)
        self.far_E = zero_reals(num_experts)
        self.load_D = zero_reals(num_devices)
        self.in_D = zero_reals(num_devices)
        self.out_D = zero_reals(num_devices)
        self.gets_D = zero_ints(num_devices)
        self.sends_D = zero_ints(num_devices)
        self.far_in_N = zero_reals(num_nodes)
        self.far_out_N = zero_reals(num_nodes)
        self.gets_N = zero_ints(num_nodes)
        self.sends_N = zero_ints(num_nodes)
        self.most_load_N = zero_reals(num_nodes)
        self.most_near_N = zero_reals(num_nodes)
        self.most_moved_N = zero_ints(num_nodes)
        self.square_load_N = zero_reals(num_nodes)
        self.square_near_N = zero_reals(num_nodes)
        self.own_load_D = zero_reals(num_devices)
        self.own_in_D = zero_reals(num_devices)
        self.own_out_D = zero_reals(num_devices)
        self.own_gets_D = zero_ints(num_devices)
        self.own_sends_D = zero_ints(num_devices)
        self.own_far_in_N = zero_reals(num_nodes)
        self.own_far_out_N = zero_reals(num_nodes)
        self.own_gets_N = zero_ints(num_nodes)
        self.own_sends_N = zero_ints(num_nodes)
        self.is_held_N = zero_ints(num_nodes)
        self.own_share_N = zero_reals(num_nodes)
        self.own_far = self.all_pairs = 0.0
        self.own_hops = self.own_fill = self.others_hops = self.others_fill = 0
        self.num_replicated = self.num_prices = self.prepaid_near = self.prepaid_far = self.is_smooth = 0

    @cython.inner
    def fill(self) -> cython.void:
        """Put every expert on its owner."""
        for i in range(self.num_devices):
            self.position_D[self.member_D[i]] = i
        for expert in range(self.num_experts):
            for n in range(self.num_nodes):
                self.total_E[expert] += self.load_EN[expert * self.num_nodes + n]
            self.all_pairs += self.total_E[expert]
            self.put(expert, self.owner_E[expert])
            self.bring_in(expert)
            self.used_D[self.owner_E[expert]] -= 1

    @cython.inner
    def put(self, expert: Index, device: Index) -> cython.void:
        """Give an expert that is out to one more device."""
        node: Index = self.node_D[device]
        at = expert * self.num_nodes + node
        self.present_ED[expert * self.num_devices + device] = 1
        if self.holders_EN[at] == 0:
            self.leader_EN[at] = device
        self.holders_EN[at] += 1
        self.holders_E[expert] += 1
        self.used_D[device] += 1
        if self.holders_E[expert] == 2:
            self.num_replicated += 1

    @cython.inner
    def drop(self, expert: Index, device: Index) -> cython.void:
        """Take a replica of an expert that is out from a device."""
        node: Index = self.node_D[device]
        at = expert * self.num_nodes + node
        self.present_ED[expert * self.num_devices + device] = 0
        self.holders_EN[at] -= 1
        self.holders_E[expert] -= 1
        self.used_D[device] -= 1
        if self.holders_E[expert] == 1:
            self.num_replicated -= 1
        if self.holders_EN[at] > 0 and self.leader_EN[at] == device:
            for i in range(self.first_N[node], self.first_N[node + 1]):
                if self.present_ED[expert * self.num_devices + self.member_D[i]]:
                    self.leader_EN[at] = self.member_D[i]
                    return

    @cython.inner
    def clear(self, expert: Index) -> Int:
        """Take all replicas from an expert that is out; their number."""
        before = self.holders_E[expert]
        for device in range(self.num_devices):
            if self.present_ED[expert * self.num_devices + device] and self.owner_E[expert] != device:
                self.drop(expert, device)
        return before - self.holders_E[expert]

    @cython.inner
    def spread(self, expert: Index) -> cython.void:
        """Compute the traffic of one expert with its present holders."""
        row_N = expert * self.num_nodes
        unserved: Real = 0.0
        num_held: Int = 0
        for n in range(self.num_nodes):
            if self.holders_EN[row_N + n]:
                num_held += 1
            else:
                unserved += self.load_EN[row_N + n]
        self.own_far = unserved / self.holders_E[expert]
        self.own_hops = self.own_fill = 0
        position: Int = 0  # place of the node in the chain between nodes, which begins at the owner
        node: Index = self.node_D[self.owner_E[expert]]
        for _ in range(self.num_nodes):
            count = self.holders_EN[row_N + node]
            self.is_held_N[node] = 1 if count else 0
            self.own_share_N[node] = 0.0
            if count == 0:
                self.own_far_out_N[node] = self.load_EN[row_N + node]
                self.own_far_in_N[node] = 0.0
                self.own_gets_N[node] = 0
                self.own_sends_N[node] = 0
            else:
                self.own_far_out_N[node] = 0.0
                self.own_far_in_N[node] = self.own_far * count
                self.own_gets_N[node] = 1 if position > 0 else 0
                self.own_sends_N[node] = 1 if position < num_held - 1 else 0
                self.spread_in_node(expert, node, count)
                depth: Int = 0
                while count >> (depth + 1):
                    depth += 1
                if position + depth > self.own_hops:
                    self.own_hops = position + depth
                fill = position << _HOP_BITS
                if count > 1:
                    fill += depth - 1
                if (count > 1 or position < num_held - 1) and fill > self.own_fill:
                    self.own_fill = fill
                position += 1
            node = node + 1 if node + 1 < self.num_nodes else 0

    @cython.inner
    def spread_in_node(self, expert: Index, node: Index, count: Int) -> cython.void:
        """Compute the traffic of one expert inside a node with ``count`` holders."""
        row_D = expert * self.num_devices
        first: Index = self.first_N[node]
        end: Index = self.first_N[node + 1]
        rest = self.load_EN[expert * self.num_nodes + node]
        for i in range(first, end):
            if self.present_ED[row_D + self.member_D[i]]:
                rest -= self.load_ED[row_D + self.member_D[i]]
        share = rest / count if rest > 0.0 else 0.0
        self.own_share_N[node] = share
        # Holders pass the expert on in a binary tree, in cyclic order from the leader.
        turn: Int = 0
        at: Index = self.position_D[self.leader_EN[expert * self.num_nodes + node]]
        for _ in range(end - first):
            device: Index = self.member_D[at]
            if self.present_ED[row_D + device]:
                self.own_load_D[device] = self.load_ED[row_D + device] + share + self.own_far
                self.own_in_D[device] = share
                self.own_out_D[device] = 0.0
                self.own_gets_D[device] = 1 if turn > 0 else 0
                children = count - 1 - 2 * turn
                self.own_sends_D[device] = 0 if children < 0 else (2 if children > 2 else children)
                turn += 1
            else:
                self.own_load_D[device] = 0.0
                self.own_in_D[device] = 0.0
                self.own_out_D[device] = self.load_ED[row_D + device]
                self.own_gets_D[device] = 0
                self.own_sends_D[device] = 0
            at = at + 1 if at + 1 < end else first

    @cython.inner
    def count(self, sign: Int) -> cython.void:
        """Add the traffic that :meth:`spread` computed to the sums, or subtract it."""
        for node in range(self.num_nodes):
            self.far_in_N[node] += sign * self.own_far_in_N[node]
            self.far_out_N[node] += sign * self.own_far_out_N[node]
            self.gets_N[node] += sign * self.own_gets_N[node]
            self.sends_N[node] += sign * self.own_sends_N[node]
            if self.is_held_N[node] == 0:
                continue
            self.most_load_N[node] = self.most_near_N[node] = 0.0
            self.square_load_N[node] = self.square_near_N[node] = 0.0
            self.most_moved_N[node] = 0
            for i in range(self.first_N[node], self.first_N[node + 1]):
                device: Index = self.member_D[i]
                self.load_D[device] += sign * self.own_load_D[device]
                self.in_D[device] += sign * self.own_in_D[device]
                self.out_D[device] += sign * self.own_out_D[device]
                self.gets_D[device] += sign * self.own_gets_D[device]
                self.sends_D[device] += sign * self.own_sends_D[device]
                load, near_in, near_out = self.load_D[device], self.in_D[device], self.out_D[device]
                self.square_load_N[node] += load * load
                self.square_near_N[node] += near_in * near_in + near_out * near_out
                self.most_load_N[node] = max(self.most_load_N[node], load)
                self.most_near_N[node] = max(self.most_near_N[node], near_in, near_out)
                self.most_moved_N[node] = max(
                    self.most_moved_N[node], self.gets_D[device], self.sends_D[device]
                )

    @cython.inner
    def take_out(self, expert: Index) -> cython.void:
        """Take the traffic of an expert out of the sums, so that its holders can change."""
        self.spread(expert)
        self.count(-1)
        self.hops_E[expert] = self.fill_E[expert] = 0
        self.note_others()

    @cython.inner
    def bring_in(self, expert: Index) -> cython.void:
        """Add the traffic of an expert with its present holders to the sums."""
        self.spread(expert)
        self.count(1)
        self.hops_E[expert], self.fill_E[expert] = self.own_hops, self.own_fill
        self.far_E[expert] = self.own_far
        for node in range(self.num_nodes):
            self.share_EN[expert * self.num_nodes + node] = self.own_share_N[node]

    @cython.inner
    def note_others(self) -> cython.void:
        """Note the longest paths of the experts that are not out."""
        self.others_hops = self.others_fill = 0
        for expert in range(self.num_experts):
            self.others_hops = max(self.others_hops, self.hops_E[expert])
            self.others_fill = max(self.others_fill, self.fill_E[expert])
