"""Measures the compute before a layer and of its experts in forward passes, on the device's clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median_high

import torch

from megatron_fssdp.collectives.device_clock import Moment, now, seconds_between
from megatron_fssdp.runtime.slots.autograd_points import in_backward

_Span = tuple[Moment, Moment]
"""Begin and end of one interval of compute."""


@dataclass(eq=False)
class _Passes:
    """An iteration's forward passes: rows of the experts, spans before the layer, spans of the experts."""

    num_rows: int = 0
    before: list[_Span] = field(default_factory=list)
    experts: list[_Span] = field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """Whether there are any."""
        return bool(self.before or self.experts)


@dataclass(eq=False)
class LayerStopwatch:
    """Times of one layer's forward passes.

    A recomputed forward pass is a part of the backward pass and is not counted. The first iteration with
    measurements is cold: kernels are loaded or compiled, memory is allocated and communicators connect. It
    counts only if no other iteration was measured.
    """

    _iterations: list[_Passes] = field(default_factory=lambda: [_Passes()])
    _begin: Moment | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows in all counted forward passes of the experts."""
        return sum(passes.num_rows for passes in self._counted)

    def layer_begins(self, device: torch.device) -> None:
        """Mark the start of the compute before the layer, after its transfers were posted.

        Then neither the host's planning and posting nor, on CUDA, the device's wait for the host count.
        """
        self._begin = None if in_backward() else now(device.type == "cuda")

    def tokens_ready(self) -> None:
        """Mark the end of the compute before the layer, which includes the gate."""
        if self._begin is not None:
            self._iterations[-1].before.append((self._begin, now(is_cuda=not isinstance(self._begin, float))))
            self._begin = None

    @contextmanager
    def experts(self, num_rows: int, device: torch.device) -> Iterator[None]:
        """Context manager around the experts' forward pass on ``num_rows`` rows."""
        begin = now(device.type == "cuda")
        yield
        if not in_backward():
            self._iterations[-1].experts.append((begin, now(device.type == "cuda")))
            self._iterations[-1].num_rows += num_rows

    def iteration_ends(self) -> None:
        """Mark the end of an iteration. The passes after the first one with measurements are warm."""
        if self._iterations[-1].is_measured:
            self._iterations.append(_Passes())
        self._begin = None

    def before_s(self) -> float:
        """Median seconds of the compute before the layer; 0 if none was measured."""
        spans = [span for passes in self._counted for span in passes.before]
        return median_high([seconds_between(*span) for span in spans]) if spans else 0.0

    def experts_s(self) -> float:
        """Total seconds of the experts' forward passes."""
        return sum(seconds_between(*span) for passes in self._counted for span in passes.experts)

    @property
    def _counted(self) -> list[_Passes]:
        cold, *warm = self._iterations
        return warm if any(passes.is_measured for passes in warm) else [cold]
