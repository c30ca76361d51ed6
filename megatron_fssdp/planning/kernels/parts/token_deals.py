"""Redistributes tokens of one group of holders. Part of the kernel of balanced dispatch.

``kernels/token_levelling.py`` says what near tokens, far tokens and groups are.

Shape letters: D devices, N nodes, P pairs of expert and device, U positions among an expert's holders.
"""

from megatron_fssdp.planning.kernels.parts.water_filling import WaterFilling
from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Flag, Index, Int, Ints, ReadInts
from megatron_fssdp.planning.native.work_arrays import zero_ints


@cython.cclass
class TokenDeals:
    """Redistributes the tokens of one group at a time, and keeps the sums of tokens.

    Attributes:
        near_P: Near tokens of each pair.
        far_P: Far tokens of each pair.
        device_P: Holder of each pair.
        node_D: Node of each device.
        load_D: Tokens that each device computes.
        near_D: Near tokens of each device.
        far_D: Far tokens of each device.
        far_N: Far tokens of each node.
        most_near: Most near tokens of a device.
        most_far: Most far tokens of a device.
        most_of_node: Most far tokens of a node.
        filling: Water filling over the positions in a group.
        chosen_U: The pairs of the present group.
        kept_U: Positions in the group whose node is not full yet.
        room_N: Far tokens of the group that each node may get.
        sum_N: Far tokens of the group that each node would get; -1 if the node is full.
    """

    near_P: Ints
    far_P: Ints
    device_P: ReadInts
    node_D: ReadInts
    load_D: Ints
    near_D: Ints
    far_D: Ints
    far_N: Ints
    most_near: Int
    most_far: Int
    most_of_node: Int
    filling: WaterFilling
    chosen_U: Ints
    kept_U: Ints
    room_N: Ints
    sum_N: Ints

    def __init__(
        self,
        own_P: ReadInts,
        near_P: Ints,
        far_P: Ints,
        device_P: ReadInts,
        node_D: ReadInts,
        num_nodes: Index,
        above_even: Int,
    ) -> None:
        num_devices: Index = node_D.shape[0]
        self.near_P, self.far_P, self.device_P, self.node_D = near_P, far_P, device_P, node_D
        self.load_D, self.near_D, self.far_D = (zero_ints(num_devices) for _ in range(3))
        self.far_N, self.room_N, self.sum_N = (zero_ints(num_nodes) for _ in range(3))
        self.chosen_U, self.kept_U = zero_ints(num_devices), zero_ints(num_devices)
        self.filling = WaterFilling(num_devices)
        for pair in range(device_P.shape[0]):
            device: Index = device_P[pair]
            self.load_D[device] += own_P[pair] + near_P[pair] + far_P[pair]
            self.near_D[device] += near_P[pair]
            self.far_D[device] += far_P[pair]
            self.far_N[node_D[device]] += far_P[pair]
        self.most_near = self.most_far = self.most_of_node = above_even
        for device in range(num_devices):
            self.most_near = max(self.most_near, self.near_D[device] + above_even)
            self.most_far = max(self.most_far, self.far_D[device] + above_even)
            self.most_of_node = max(self.most_of_node, self.far_N[node_D[device]] + above_even)

    @cython.inner
    def deal(self, is_far: Flag, size: Index, own_pair: Index) -> Flag:
        """Redistribute the tokens of the group, if this lowers the load of one of its holders.

        Args:
            is_far: Whether the tokens come from other nodes.
            size: Number of pairs in the group.
            own_pair: The pair whose holder's load should become lower.

        Returns:
            Whether the tokens were redistributed.
        """
        tokens_P, received_D = self.near_P, self.near_D
        limit = self.most_near
        if is_far:
            tokens_P, received_D = self.far_P, self.far_D
            limit = self.most_far
        total: Int = 0
        for i in range(size):
            now = tokens_P[self.chosen_U[i]]
            device: Index = self.device_P[self.chosen_U[i]]
            total += now
            self.filling.load_U[i] = self.load_D[device] - now
            self.filling.room_U[i] = limit - received_D[device] + now
        if is_far:
            self.divide_among_nodes(total, size)
        else:
            for i in range(size):
                self.filling.rising_U[i] = i
            self.filling.divide(total, size)
        for i in range(size):
            if self.chosen_U[i] == own_pair and self.filling.part_U[i] >= tokens_P[own_pair]:
                return False
        for i in range(size):
            device = self.device_P[self.chosen_U[i]]
            change = self.filling.part_U[i] - tokens_P[self.chosen_U[i]]
            tokens_P[self.chosen_U[i]] += change
            received_D[device] += change
            self.load_D[device] += change
            if is_far:
                self.far_N[self.node_D[device]] += change
        return True

    @cython.inner
    def divide_among_nodes(self, amount: Int, size: Index) -> cython.void:
        """Divide far tokens among a group's holders, with a limit for each node.

        Args:
            amount: Far tokens of the group.
            size: Number of pairs in the group.
        """
        num_kept = size
        for i in range(size):
            self.kept_U[i] = i
            node: Index = self.node_of(i)
            self.room_N[node] = self.most_of_node - self.far_N[node]
        for i in range(size):
            self.room_N[self.node_of(i)] += self.far_P[self.chosen_U[i]]
        while True:
            for i in range(num_kept):
                self.filling.rising_U[i] = self.kept_U[i]
                self.sum_N[self.node_of(self.kept_U[i])] = 0
            self.filling.divide(amount, num_kept)
            for i in range(num_kept):
                self.sum_N[self.node_of(self.kept_U[i])] += self.filling.part_U[self.kept_U[i]]
            # A node whose limit is exceeded gets exactly its limit. The other nodes share the rest.
            any_full = False
            for i in range(num_kept):
                node = self.node_of(self.kept_U[i])
                if self.sum_N[node] <= self.room_N[node]:
                    continue
                any_full = True
                inside: Index = 0
                for j in range(i, num_kept):
                    if self.node_of(self.kept_U[j]) == node:
                        self.filling.rising_U[inside] = self.kept_U[j]
                        inside += 1
                self.filling.divide(self.room_N[node], inside)
                amount -= self.room_N[node]
                self.sum_N[node] = -1
            if not any_full:
                return
            inside = 0
            for i in range(num_kept):
                if self.sum_N[self.node_of(self.kept_U[i])] >= 0:
                    self.kept_U[inside] = self.kept_U[i]
                    inside += 1
            num_kept = inside

    @cython.inner
    def node_of(self, position: Index) -> Index:
        """Node of the holder at a position in the group."""
        return self.node_D[self.device_P[self.chosen_U[position]]]
