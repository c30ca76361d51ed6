"""Measures the compute before a layer and of its experts in forward passes, on the device's clock."""

from dataclasses import dataclass, field
from statistics import median_high

import torch

from megatron_fssdp.collectives.device_clock import Moment, now, seconds_between
from megatron_fssdp.runtime.clocks.pass_timer import Part
from megatron_fssdp.runtime.slots.autograd_points import in_backward

_Span = tuple[Moment, Moment]  # begin and end


@dataclass(eq=False)
class LayerStopwatch:
    """Times of one layer's forward passes, without recomputed ones.

    The first iteration with measurements is cold: kernels are loaded or compiled, memory is allocated and
    communicators connect. It counts only until another iteration is measured.
    """

    num_rows: int = 0  # in all counted forward passes of the experts
    _before: list[_Span] = field(default_factory=list)
    _experts: list[_Span] = field(default_factory=list)
    _num_over: int = 0  # iterations with measurements that have ended
    _begin: Moment | None = None  # of the span that runs

    def layer_begins(self, device: torch.device) -> None:
        """Mark the start of the compute before the layer, after the host has planned and posted transfers."""
        self._begin = None if in_backward() else now(device.type == "cuda")

    def reach(self, part: Part | None, tensor: torch.Tensor) -> None:
        """Mark the begin of a part of the pass, with the rows ``[R, M]`` that the experts got or made."""
        if in_backward() or part == "other":  # Other layers may have computed before this one's own part.
            return
        begin, self._begin, moment = self._begin, None, now(tensor.is_cuda)
        if part == "experts":
            self._begin = moment
        elif begin is not None:
            if self._num_over == 1:  # The cold iteration is dropped.
                self._num_over, self.num_rows = 2, 0
                self._before.clear()
                self._experts.clear()
            (self._before if part == "dispatch" else self._experts).append((begin, moment))
            self.num_rows += 0 if part == "dispatch" else len(tensor)

    def iteration_ends(self) -> None:
        """Mark the end of an iteration."""
        self._num_over += bool(self._before or self._experts)
        self._begin = None

    def before_s(self) -> float:
        """Median seconds of the compute before the layer; 0 if none was measured."""
        return median_high([seconds_between(*span) for span in self._before]) if self._before else 0.0

    def experts_s(self) -> float:
        """Total seconds of the experts' forward passes."""
        return sum(seconds_between(*span) for span in self._experts)
