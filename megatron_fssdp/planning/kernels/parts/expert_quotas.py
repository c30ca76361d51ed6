"""The quotas of one expert at a time. Part of the kernels of dispatch by quotas.

``planning/dispatch/quota_dispatch.py`` says how tokens and quotas are matched along lines. Of the tokens that
the devices of a node send away for an expert, the first ones stay in the node, up to the sum of the node's
near quotas. Near tokens and near quotas lie along one line in each node, far ones along one line of all
devices.

Quotas belong to pairs of an expert and a device, sorted by expert, then device. Most devices have no quota
for most experts, so no kernel makes a table of all experts and devices.

Shape letters: E experts, D devices, N nodes, P pairs of expert and device.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, ReadInts, ReadInts2
from megatron_fssdp.planning.native.work_arrays import zero_ints


@cython.cclass
class ExpertQuotas:
    """The quotas of one expert at a time.

    It is made from ``counts_DE``, from the quotas of all pairs (int64 ``[5 P]``: all experts, then all
    devices, own, near and far quotas) and from three arrays of the nodes.

    Attributes:
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        expert_P: Expert of each pair, ascending.
        device_P: Device of each pair, ascending for each expert.
        own_P: Quotas for own tokens.
        near_P: Quotas for tokens of other devices in the same node.
        far_P: Quotas for tokens of other nodes.
        node_D: Node of each device, int64 ``[D]``.
        by_node_D: The devices by node, then number, int64 ``[D]``.
        first_N: Where the devices of each node begin in ``by_node_D``, then D; int64 ``[N + 1]``.
        expert: The present expert.
        first: Its first pair.
        end: The position after its last pair.
        own_D: Its quota for own tokens on each device.
        near_N: Its near quotas in each node.
        far_N: Its far quotas in each node.
    """

    counts_DE: ReadInts2
    expert_P: ReadInts
    device_P: ReadInts
    own_P: ReadInts
    near_P: ReadInts
    far_P: ReadInts
    node_D: ReadInts
    by_node_D: ReadInts
    first_N: ReadInts
    expert: Index
    first: Index
    end: Index
    own_D: Ints
    near_N: Ints
    far_N: Ints

    def __init__(
        self,
        counts_DE: ReadInts2,
        quotas: ReadInts,
        node_D: ReadInts,
        by_node_D: ReadInts,
        first_N: ReadInts,
    ) -> None:
        size: Index = quotas.shape[0] // 5
        self.counts_DE, self.expert_P, self.device_P = counts_DE, quotas[:size], quotas[size : 2 * size]
        self.own_P, self.near_P = quotas[2 * size : 3 * size], quotas[3 * size : 4 * size]
        self.far_P = quotas[4 * size :]
        self.node_D, self.by_node_D, self.first_N = node_D, by_node_D, first_N
        self.expert, self.first, self.end = -1, 0, 0
        num_devices: Index = node_D.shape[0]
        num_nodes: Index = first_N.shape[0] - 1
        work: Ints = zero_ints(num_devices + 2 * num_nodes)  # one array, because each takes a microsecond
        self.own_D, self.near_N = work[:num_devices], work[num_devices : num_devices + num_nodes]
        self.far_N = work[num_devices + num_nodes :]

    @cython.inner
    def turn_to(self, expert: Index) -> cython.void:
        """Make an expert the present one. Its number must be higher than before."""
        for pair in range(self.first, self.end):
            device: Index = self.device_P[pair]
            node: Index = self.node_D[device]
            self.own_D[device] = 0
            self.near_N[node] = 0
            self.far_N[node] = 0
        self.expert = expert
        self.first = self.end
        while self.first < self.expert_P.shape[0] and self.expert_P[self.first] < expert:
            self.first += 1
        self.end = self.first
        while self.end < self.expert_P.shape[0] and self.expert_P[self.end] == expert:
            device = self.device_P[self.end]
            node = self.node_D[device]
            self.own_D[device] = self.own_P[self.end]
            self.near_N[node] += self.near_P[self.end]
            self.far_N[node] += self.far_P[self.end]
            self.end += 1

    @cython.inner
    def leaving(self, node: Index, stop: Index) -> Int:
        """Tokens of the present expert that leave the devices of a node whose numbers are below ``stop``."""
        tokens: Int = 0
        for i in range(self.first_N[node], self.first_N[node + 1]):
            device: Index = self.by_node_D[i]
            if device >= stop:
                break
            tokens += self.counts_DE[device, self.expert] - self.own_D[device]
        return tokens

    @cython.inner
    def far_tokens_before(self, source: Index, counts: Int) -> Int:
        """Tokens of the present expert that the devices before a source send to other nodes.

        Afterwards ``near_N`` is zero.

        Args:
            source: Number of the source.
            counts: Tokens of the expert that these devices have.
        """
        tokens = counts
        for pair in range(self.first, self.end):
            node: Index = self.node_D[self.device_P[pair]]
            if self.device_P[pair] < source:
                tokens -= self.own_P[pair]
            if self.near_N[node] > 0:
                tokens -= min(self.near_N[node], self.leaving(node, source))
                self.near_N[node] = 0
        return tokens
