# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: infer_types=True, annotation_typing=False
"""The price of a layer from what its busiest devices and links do."""

import cython

from megatron_fssdp.planning.cost.layer_costs import LayerCosts
from megatron_fssdp.planning.replica_life import ReplicaLife

if not cython.compiled:  # the .pxd file imports them for C
    from megatron_fssdp.planning.kernels.constants import HOP_BITS


class PriceFormula:
    """Seconds of a layer in an iteration, by its costs; ``cost/layer_seconds.py`` says what they contain.

    Attributes:
        limits_devices: Whether one device alone reaches less between nodes than all of its node together.
        first: Seconds of the gather before the gate if it is not that of all replicas; otherwise -1.
        added: Seconds of the gather after the gate.
        is_far: Whether links between nodes took longest in the last exchange or transfer.
    """

    def __init__(self, costs: LayerCosts) -> None:
        self.dispatch, self.combine = memoryview(costs.dispatch), memoryview(costs.combine)
        self.moves, self.of_hops = memoryview(costs.moves), memoryview(costs.of_hops)
        self.per_token, self.times, self.counts = costs.per_token_s, costs.num_micro_batches, costs.counts_s
        self.hidden, self.hidden_back = costs.hidden_s, costs.hidden_back_s
        self.in_turn, self.early = costs.in_turn, costs.early
        self.limits_devices = self.moves[2, 1] > self.moves[1, 1]
        self.is_resident = costs.life is ReplicaLife.RESIDENT
        self.is_pass = costs.life is ReplicaLife.LAYER_PASS
        self.is_micro_batch = costs.life is ReplicaLife.MICRO_BATCH
        self.first, self.added = -1.0, 0.0

    def parts(
        self,
        tokens: float,
        near: float,
        far: float,
        device: float,
        replicas: tuple,
        gather: tuple,
        addition: tuple,
    ) -> tuple:
        """Seconds of all-to-alls, of experts, and for which compute waits for gathers and for reductions.

        The numbers are the pairs of the device that computes most and those on the busiest links inside
        nodes, of a node and of a ``device`` between nodes, and three gathers: of all replicas, before the
        gate and after it. A gather has experts on the busiest links, hops, and the hops of both kinds before
        the last one of the longest path.
        """
        self.first, self.added = self.gather_of(gather), self.gather_of(addition)
        moved_near, moved_far, moved_device, hops, near_hops, far_hops = replicas
        fill = (far_hops << HOP_BITS) + near_hops
        self.seconds(tokens, near, far, device, moved_near, moved_far, moved_device, hops, fill)
        return self.all_to_all, self.experts, self.waits, self.waits_back

    def gather_of(self, traffic: tuple) -> float:
        """Seconds of a gather, as in :meth:`parts`."""
        near, far, device, hops, near_hops, far_hops = traffic
        return self.transfer(1, near, far, device, hops, (far_hops << HOP_BITS) + near_hops)

    def exchange(self, lines: memoryview, near: float, far: float, device: float) -> float:
        """Seconds of an all-to-all with pairs on the busiest links, as in :meth:`parts`."""
        near = lines[0, 0] + near * lines[0, 1] if near > 0.0 else 0.0
        far = lines[1, 0] + max(far * lines[1, 1], device * lines[2, 1]) if far > 0.0 else 0.0
        self.is_far = far >= near
        return near + far if self.in_turn else max(near, far)

    def transfer(self, column: int, near: float, far: float, device: float, hops: int, fill: int) -> float:
        """Seconds of a gather (column 1) or of a reduction (2); ``layer_seconds.transfer_times`` explains."""
        if hops == 0:
            return 0.0
        first = 3 * (column - 1) + (6 if far > 0.0 else 0)
        filling = (fill & ((1 << HOP_BITS) - 1)) * self.of_hops[hops, first]
        filling += (fill >> HOP_BITS) * self.of_hops[hops, first + 1]
        least = self.of_hops[hops, first + 2]
        if near > 0.0:
            near = self.moves[0, 0] + near * self.moves[0, column]
            near = max(near + filling, least) if near > 0.0 else 0.0
        if far > 0.0:
            far = self.moves[1, 0] + max(far * self.moves[1, column], device * self.moves[2, column])
            far = max(far + filling, least) if far > 0.0 else 0.0
        self.is_far = far >= near
        return max(near, far)

    def seconds(
        self,
        tokens: float,
        near: float,
        far: float,
        device: float,
        moved_near: float,
        moved_far: float,
        moved_device: float,
        hops: int,
        fill: int,
    ) -> float:
        """Seconds of the layer from what its busiest devices and links do; ``fill`` as in ``PricedLayer``."""
        dispatch = self.exchange(self.dispatch, near, far, device)
        combine = self.exchange(self.combine, near, far, device)
        combine_is_far = self.is_far
        self.all_to_all = self.times * (self.counts + 2.0 * (dispatch + combine))
        self.experts = self.per_token * tokens
        again = self.transfer(1, moved_near, moved_far, moved_device, hops, fill)
        again_is_far = self.is_far
        gather = again if self.first < 0.0 else self.first
        reduce = self.transfer(2, moved_near, moved_far, moved_device, hops, fill)
        if self.is_resident:
            self.waits, self.waits_back = 0.0, max(0.0, 2.0 * reduce - self.hidden_back)
        else:
            self.waits = max(0.0, (1.0 - self.early) * gather - self.hidden) + self.added
            self.waits_back = max(0.0, reduce - self.hidden_back)
        if self.is_micro_batch:
            self.waits = self.times * again
            self.waits_back *= self.times
        if self.is_pass and hops > 0:
            left = max(0.0, again - max(0.0, self.hidden_back - reduce))
            if again_is_far != combine_is_far:
                left = max(0.0, left - combine)
            self.waits += (self.times - 1.0) * max(0.0, again - self.hidden) + self.times * left
            self.waits_back *= self.times
        return self.all_to_all + self.experts + self.waits + self.waits_back
