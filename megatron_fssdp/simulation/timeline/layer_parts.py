"""Seconds of the parts of one layer, from which timelines of iterations are built.

Shape letters: I iterations.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.cost.link_seconds import LinkTimes
from megatron_fssdp.planning.cost.stepped_exchange import SteppedExchange


@dataclass(frozen=True, eq=False)
class LayerSeconds:
    """Seconds of the parts of one layer's forward pass in a micro-batch. Arrays are ``[I]``.

    Attributes:
        before_layer_s: Seconds of compute between the previous MoE layer and this transformer layer.
        before_gate_s: Seconds of compute before the gate, under which spAG can be hidden.
        counts_s: Seconds of gathering the router counts and, with exact dispatch, of computing shares.
        dispatch: Seconds of the all-to-alls of rows and probabilities.
        combine: Seconds of the all-to-all of results.
        experts_s: Seconds of the experts on the slowest device.
        gather: Seconds of spAG.
        addition_s: Seconds of the transfer that calibration adds after the gate.
        reduce_s: Seconds of spRS.
        regather: Seconds of the spAG of all replicas before the backward pass.
        is_ahead: Whether transfers run at the same time as compute.
        is_rematerialized: Whether replicas are released after each pass and gathered again.
        is_each_pass: Whether replicas are planned, gathered and reduced separately for every micro-batch.
        gather_early: Share of spAG that runs at the same time as the experts of the layer before.
        reduce_late: Share of spRS that runs at the same time as their backward pass.
        steps: Steps of the smart schedule. None if no iteration uses it.
        in_steps: Whether dispatch, experts and combine run in these steps, and not one after the other.
        host_s: Seconds in which the device waits for the host between the counts and the dispatch.
        host_first_s: More of these seconds in an iteration's first micro-batch.
    """

    before_layer_s: np.ndarray
    before_gate_s: np.ndarray
    counts_s: np.ndarray | float
    dispatch: LinkTimes
    combine: LinkTimes
    experts_s: np.ndarray
    gather: LinkTimes
    addition_s: np.ndarray
    reduce_s: np.ndarray
    regather: LinkTimes
    is_ahead: np.ndarray
    is_rematerialized: np.ndarray
    is_each_pass: np.ndarray
    gather_early: np.ndarray | float = 0.0
    reduce_late: np.ndarray | float = 0.0
    steps: SteppedExchange | None = None
    in_steps: np.ndarray | bool = False
    host_s: np.ndarray | float = 0.0
    host_first_s: np.ndarray | float = 0.0

    def exchange_and_experts_s(
        self, first: LinkTimes, second: LinkTimes, experts_s: np.ndarray
    ) -> np.ndarray:
        """Return the seconds from the first sent row to the last result, ``[I]``.

        Args:
            first: Seconds of the exchange before the experts.
            second: Seconds of the exchange after the experts.
            experts_s: Seconds of the experts on the slowest device, ``[I]``.
        """
        at_once_s = first.seconds + experts_s + second.seconds
        if self.steps is None:
            return at_once_s
        return np.where(self.in_steps, self.steps.seconds(first, second, experts_s), at_once_s)
