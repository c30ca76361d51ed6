"""Seconds of the parts of a layer's passes in a run's records."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class PassMetrics:
    """Seconds of the forward or the backward passes of one MoE layer in one iteration, means over the ranks.

    The parts do not include waits for replicas' weights and gradients. A recomputed forward pass counts as
    backward pass.

    Attributes:
        other_s: From the beginning of the transformer layer to the dispatch: attention, the gate, and shared
            experts that do not overlap.
        dispatch_s: From the exchange of counts to the sorted rows. Under the smart schedule this includes the
            combine.
        experts_s: The experts' compute.
        combine_s: From the experts' results to the layer's output. This includes the wait for the rank whose
            experts take longest.
        experts_slowest_s: The experts' compute on the rank where it takes longest.
    """

    other_s: _Seconds
    dispatch_s: _Seconds
    experts_s: _Seconds
    combine_s: _Seconds
    experts_slowest_s: _Seconds

    @property
    def exchange_s(self) -> float:
        """Dispatch and combine without the wait for the slowest experts: the simulator's all-to-all."""
        waited_s = self.experts_slowest_s - self.experts_s
        return max(0.0, self.dispatch_s + self.combine_s - waited_s)
