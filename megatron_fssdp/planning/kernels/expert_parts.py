# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: infer_types=True, annotation_typing=False
"""The experts that have a part in the busiest device, or in the busiest link."""

import cython

from megatron_fssdp.planning.arrays import zero_ints, zero_reals
from megatron_fssdp.planning.cost.layer_costs import CostedLayer
from megatron_fssdp.planning.placement.placement import ExpertPlacement

if not cython.compiled:  # the .pxd file imports it for C
    from megatron_fssdp.planning.kernels.priced_layer import PricedLayer


class ExpertParts(PricedLayer):
    """A priced layer that finds the experts whose change may save most.

    Attributes:
        part_E: Parts of the experts in what :meth:`rank` looks at.
        is_tired_E: 1 for the experts that saved nothing during the present descent.
    """

    def __init__(self, layer: CostedLayer, placement: ExpertPlacement, slots: int) -> None:
        PricedLayer.__init__(self, layer, placement, slots)
        self.part_E, self.is_tired_E = zero_reals(self.num_experts), zero_ints(self.num_experts)

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
