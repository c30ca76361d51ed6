"""Measures the compute before a layer and of its experts in forward passes, on the device's clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median_high

import torch

from megatron_fssdp.collectives.device_clock import Moment, now, seconds_between
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
    _begin: Moment | None = None

    def layer_begins(self, device: torch.device) -> None:
        """Mark the start of the compute before the layer, after the host has planned and posted transfers."""
        self._begin = None if in_backward() else now(device.type == "cuda")

    def tokens_ready(self) -> None:
        """Mark the end of the compute before the layer, which includes the gate."""
        if self._begin is not None:
            self._drop_cold()
            self._before.append((self._begin, now(is_cuda=not isinstance(self._begin, float))))
            self._begin = None

    @contextmanager
    def experts(self, num_rows: int, device: torch.device) -> Iterator[None]:
        """Context manager around the experts' forward pass on ``num_rows`` rows."""
        begin = now(device.type == "cuda")
        yield
        if not in_backward():
            self._drop_cold()
            self._experts.append((begin, now(device.type == "cuda")))
            self.num_rows += num_rows

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

    def _drop_cold(self) -> None:
        if self._num_over == 1:
            self._num_over, self.num_rows = 2, 0
            self._before.clear()
            self._experts.clear()
