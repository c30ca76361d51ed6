"""Kernels of dispatch by quotas: checks, sums, and one rank's row and column of the dispatch.

``planning/dispatch/quota_dispatch.py`` says how tokens and quotas are matched along lines. Of the tokens that
the devices of a node send away for an expert, the first ones stay in the node, up to the sum of the node's
near quotas. Near tokens and near quotas lie along one line in each node, far ones along one line of all
devices.

Quotas belong to pairs of an expert and a device, sorted by expert, then device. Most devices have no quota
for most experts, so no kernel makes a table of all experts and devices.

Shape letters: E experts, D devices, N nodes, G experts present on a device, P pairs of expert and device.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Flag, Index, Int, Ints, Ints2, ReadInts, ReadInts2
from megatron_fssdp.planning.native.work_arrays import zero_ints


@cython.cclass
class _Quotas:
    """The quotas of one expert at a time.

    Attributes:
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        expert_P: Expert of each pair, ascending, int64 ``[P]``.
        device_P: Device of each pair, ascending for each expert, int64 ``[P]``.
        own_P: Quotas for own tokens, int64 ``[P]``.
        near_P: Quotas for tokens of other devices in the same node, int64 ``[P]``.
        far_P: Quotas for tokens of other nodes, int64 ``[P]``.
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
        expert_P: ReadInts,
        device_P: ReadInts,
        own_P: ReadInts,
        near_P: ReadInts,
        far_P: ReadInts,
        node_D: ReadInts,
        by_node_D: ReadInts,
        first_N: ReadInts,
    ) -> None:
        self.counts_DE, self.expert_P, self.device_P = counts_DE, expert_P, device_P
        self.own_P, self.near_P, self.far_P = own_P, near_P, far_P
        self.node_D, self.by_node_D, self.first_N = node_D, by_node_D, first_N
        self.expert, self.first, self.end = -1, 0, 0
        self.own_D = zero_ints(node_D.shape[0])
        self.near_N, self.far_N = zero_ints(first_N.shape[0]), zero_ints(first_N.shape[0])

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


def are_fillable(
    counts_DE: ReadInts2,
    expert_P: ReadInts,
    device_P: ReadInts,
    own_P: ReadInts,
    near_P: ReadInts,
    far_P: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
) -> Flag:
    """Whether no quota is negative and the quotas add up to the tokens that are there.

    Args:
        counts_DE: The arguments of all functions are those of :class:`_Quotas`.
        expert_P: Experts.
        device_P: Devices.
        own_P: Quotas for own tokens.
        near_P: Near quotas.
        far_P: Far quotas.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
    """
    quotas = _Quotas(counts_DE, expert_P, device_P, own_P, near_P, far_P, node_D, by_node_D, first_N)
    left_E: Ints = zero_ints(counts_DE.shape[1])
    with cython.nogil:
        is_fillable = _are_fillable(quotas, left_E)
    return is_fillable


@cython.inner
def _are_fillable(quotas: _Quotas, left_E: Ints) -> Flag:
    num_devices: Index = quotas.node_D.shape[0]
    for device in range(num_devices):
        for expert in range(left_E.shape[0]):
            left_E[expert] += quotas.counts_DE[device, expert]
    for expert in range(left_E.shape[0]):
        quotas.turn_to(expert)
        for pair in range(quotas.first, quotas.end):
            own, near, far = quotas.own_P[pair], quotas.near_P[pair], quotas.far_P[pair]
            holder: Index = quotas.device_P[pair]
            if own < 0 or near < 0 or far < 0 or own > quotas.counts_DE[holder, expert]:
                return False
            left_E[expert] -= own + near + far
        for pair in range(quotas.first, quotas.end):
            node: Index = quotas.node_D[quotas.device_P[pair]]
            if quotas.near_N[node] == 0 and quotas.far_N[node] == 0:
                continue
            left = quotas.leaving(node, num_devices) - quotas.near_N[node]
            if left < 0 or (left > 0 and quotas.far_N[node] > 0):
                return False
        if left_E[expert] != 0:
            return False
    return True


def sum_near_tokens(
    counts_DE: ReadInts2,
    expert_P: ReadInts,
    device_P: ReadInts,
    own_P: ReadInts,
    near_P: ReadInts,
    far_P: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    near_out_D: Ints,
) -> None:
    """Count the tokens that every device sends to other devices of its node.

    Args:
        counts_DE: As in :func:`are_fillable`, and so are the arguments up to ``first_N``.
        expert_P: Experts.
        device_P: Devices.
        own_P: Quotas for own tokens.
        near_P: Near quotas.
        far_P: Far quotas.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
        near_out_D: Zeros; gets the tokens, int64 ``[D]``.
    """
    quotas = _Quotas(counts_DE, expert_P, device_P, own_P, near_P, far_P, node_D, by_node_D, first_N)
    with cython.nogil:
        for expert in range(counts_DE.shape[1]):
            quotas.turn_to(expert)
            for pair in range(quotas.first, quotas.end):
                node: Index = node_D[device_P[pair]]
                for i in range(first_N[node], first_N[node + 1]):
                    if quotas.near_N[node] == 0:  # all near quotas of the node are filled
                        break
                    device: Index = by_node_D[i]
                    near = min(counts_DE[device, expert] - quotas.own_D[device], quotas.near_N[node])
                    quotas.near_N[node] -= near
                    near_out_D[device] += near


def quota_row(
    counts_DE: ReadInts2,
    expert_P: ReadInts,
    device_P: ReadInts,
    own_P: ReadInts,
    near_P: ReadInts,
    far_P: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    source: Index,
    sent_expert_P: Ints,
    sent_device_P: Ints,
    sent_tokens_P: Ints,
    order_P: Ints,
    send_D: Ints,
) -> Index:
    """The tokens that one source sends.

    Args:
        counts_DE: As in :func:`are_fillable`, and so are the arguments up to ``first_N``.
        expert_P: Experts.
        device_P: Devices.
        own_P: Quotas for own tokens.
        near_P: Near quotas.
        far_P: Far quotas.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
        source: Number of the source.
        sent_expert_P: Gets the expert of each chunk, ascending, int64 with room for P chunks.
        sent_device_P: Gets the device of each chunk, ascending for each expert.
        sent_tokens_P: Gets the tokens of each chunk, 1 or more.
        order_P: Gets the positions of the chunks, sorted by device, then expert.
        send_D: Zeros; gets the tokens of each device, int64 ``[D]``.

    Returns:
        Number of chunks.
    """
    quotas = _Quotas(counts_DE, expert_P, device_P, own_P, near_P, far_P, node_D, by_node_D, first_N)
    before_E: Ints = zero_ints(counts_DE.shape[1])
    next_D: Ints = zero_ints(node_D.shape[0] + 1)
    with cython.nogil:
        for device in range(source):
            for expert in range(counts_DE.shape[1]):
                before_E[expert] += counts_DE[device, expert]
        num_chunks = _find_chunks(
            quotas, source, before_E, sent_expert_P, sent_device_P, sent_tokens_P, next_D, send_D
        )
        for device in range(node_D.shape[0]):
            next_D[device + 1] += next_D[device]
        for chunk in range(num_chunks):
            place: Index = next_D[sent_device_P[chunk]]
            next_D[sent_device_P[chunk]] += 1
            order_P[place] = chunk
    return num_chunks


@cython.inner
def _find_chunks(
    quotas: _Quotas,
    source: Index,
    before_E: ReadInts,
    sent_expert_P: Ints,
    sent_device_P: Ints,
    sent_tokens_P: Ints,
    next_D: Ints,
    send_D: Ints,
) -> Index:
    """Find the chunks of :func:`quota_row`, and count those of each device in ``next_D[device + 1]``."""
    num_chunks: Index = 0
    home: Index = quotas.node_D[source]
    for expert in range(before_E.shape[0]):
        if quotas.counts_DE[source, expert] == 0:
            continue
        quotas.turn_to(expert)
        # Where this source's tokens begin on both lines, and how many there are.
        near_at: Int = 0
        near_left: Int = 0
        far_at: Int = 0
        far_left: Int = quotas.counts_DE[source, expert] - quotas.own_D[source]
        if far_left > 0 and quotas.near_N[home] > 0:
            before: Int = quotas.leaving(home, source)
            near_at = min(before, quotas.near_N[home])
            near_left = min(before + far_left, quotas.near_N[home]) - near_at
            far_left -= near_left
        if far_left > 0:
            far_at = quotas.far_tokens_before(source, before_E[expert])
        # Quotas before this source's tokens are passed, then the tokens are handed out.
        for pair in range(quotas.first, quotas.end):
            device: Index = quotas.device_P[pair]
            tokens: Int = quotas.own_P[pair] if device == source else 0
            if near_left > 0 and quotas.node_D[device] == home:
                passed: Int = min(quotas.near_P[pair], near_at)
                near_at -= passed
                near: Int = min(quotas.near_P[pair] - passed, near_left)
                near_left -= near
                tokens += near
            if far_left > 0:
                passed = min(quotas.far_P[pair], far_at)
                far_at -= passed
                far: Int = min(quotas.far_P[pair] - passed, far_left)
                far_left -= far
                tokens += far
            if tokens > 0:
                sent_expert_P[num_chunks] = expert
                sent_device_P[num_chunks] = device
                sent_tokens_P[num_chunks] = tokens
                send_D[device] += tokens
                next_D[device + 1] += 1
                num_chunks += 1
    return num_chunks


def quota_column(
    counts_DE: ReadInts2,
    expert_P: ReadInts,
    device_P: ReadInts,
    own_P: ReadInts,
    near_P: ReadInts,
    far_P: ReadInts,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
    device: Index,
    expert_G: ReadInts,
    received_DG: Ints2,
) -> None:
    """The tokens that one device receives.

    Args:
        counts_DE: As in :func:`are_fillable`, and so are the arguments up to ``first_N``.
        expert_P: Experts.
        device_P: Devices.
        own_P: Quotas for own tokens.
        near_P: Near quotas.
        far_P: Far quotas.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
        device: Number of the device.
        expert_G: Experts whose tokens are wanted, ascending, int64 ``[G]``.
        received_DG: Gets the tokens by source and these experts, int64 ``[D, G]``.
    """
    quotas = _Quotas(counts_DE, expert_P, device_P, own_P, near_P, far_P, node_D, by_node_D, first_N)
    home: Index = node_D[device]
    with cython.nogil:
        for place in range(expert_G.shape[0]):
            expert: Index = expert_G[place]
            quotas.turn_to(expert)
            near_at: Int = 0
            near_left: Int = 0
            far_at: Int = 0
            far_left: Int = 0
            for pair in range(quotas.first, quotas.end):
                if device_P[pair] == device:
                    near_left = near_P[pair]
                    far_left = far_P[pair]
                    break
                far_at += far_P[pair]
                if node_D[device_P[pair]] == home:
                    near_at += near_P[pair]
            for source in range(node_D.shape[0]):
                # Here near_N has the near quotas that the sources before have not filled.
                node: Index = node_D[source]
                far: Int = counts_DE[source, expert] - quotas.own_D[source]
                near: Int = min(far, quotas.near_N[node])
                quotas.near_N[node] -= near
                far -= near
                tokens: Int = quotas.own_D[device] if source == device else 0
                if node == home:
                    passed: Int = min(near, near_at)
                    near_at -= passed
                    near = min(near - passed, near_left)
                    near_left -= near
                    tokens += near
                passed = min(far, far_at)
                far_at -= passed
                far = min(far - passed, far_left)
                far_left -= far
                received_DG[source, place] = tokens + far


def fill_quotas(
    counts_DE: ReadInts2,
    expert_P: ReadInts,
    device_P: ReadInts,
    own_P: Ints,
    near_P: Ints,
    far_P: Ints,
    node_D: ReadInts,
    by_node_D: ReadInts,
    first_N: ReadInts,
) -> None:
    """Fill each device's quota with its own tokens first, then with those of its node, then with all others.

    Args:
        counts_DE: As in :func:`are_fillable`, and so are the arguments that are not described.
        expert_P: Experts.
        device_P: Devices.
        own_P: Tokens of its expert that each device computes; gets the device's own tokens among them.
        near_P: Zeros; gets the tokens of other devices of the node.
        far_P: Zeros; gets the tokens of other nodes.
        node_D: Nodes.
        by_node_D: Devices by node.
        first_N: First devices of nodes.
    """
    for pair in range(expert_P.shape[0]):
        own = min(own_P[pair], counts_DE[device_P[pair], expert_P[pair]])
        far_P[pair] = own_P[pair] - own
        own_P[pair] = own
    quotas = _Quotas(counts_DE, expert_P, device_P, own_P, near_P, far_P, node_D, by_node_D, first_N)
    with cython.nogil:
        for expert in range(counts_DE.shape[1]):
            quotas.turn_to(expert)
            for pair in range(quotas.first, quotas.end):
                if far_P[pair] == 0:
                    continue
                node: Index = node_D[device_P[pair]]
                near = min(far_P[pair], quotas.leaving(node, node_D.shape[0]) - quotas.near_N[node])
                quotas.near_N[node] += near
                near_P[pair] = near
                far_P[pair] -= near
