"""Paced compute: it takes the time that follows from a stated throughput, but uses no cores.

There are more ranks than cores. With real compute, a busy rank would use the cores of an idle one, and
imbalance would not be visible. Therefore attention and experts sleep for their FLOPs divided by a stated
rate, forward and backward. All tensors that are moved, gradients of weights included, exist in their real
sizes.

Shape letters: T tokens, M model dim.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD


@dataclass
class Timeline:
    """Time spans of one rank, for traces: name, begin and end on ``time.perf_counter``'s clock."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Record the time span of the code in the block."""
        begin_s = time.perf_counter()
        yield
        self.spans.append((what, begin_s, time.perf_counter()))

    def sleep(self, what: str, seconds: float) -> None:
        """Sleep, and record the time span."""
        begin_s = time.perf_counter()
        time.sleep(seconds)
        self.spans.append((what, begin_s, time.perf_counter()))


def paced(hidden: torch.Tensor, forward_s: float, timeline: Timeline, what: str) -> torch.Tensor:
    """Return the hidden states after paced compute. The backward pass takes twice the forward time."""
    result: torch.Tensor = _Paced.apply(timeline, what, forward_s, hidden)
    return result


def paced_experts(
    rows: torch.Tensor,
    probs: torch.Tensor,
    weights: Sequence[torch.Tensor],
    forward_s: float,
    timeline: Timeline,
    what: str,
) -> torch.Tensor:
    """Return the rows after paced compute in place of experts.

    Args:
        rows: Rows of all experts, ``[T, M]``.
        probs: Probabilities of the rows, ``[T]``. They get gradients, as with real experts.
        weights: Weights of all present experts. Their gradients are zeros.
        forward_s: Seconds of the forward pass. The backward pass takes twice this time.
        timeline: Timeline that records the time spans.
        what: Name of the time spans.
    """
    result: torch.Tensor = _Paced.apply(timeline, what, forward_s, rows, probs, *weights)
    return result


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, timeline: Timeline, what: str, forward_s: float, hidden: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        ctx.timeline, ctx.what, ctx.forward_s = timeline, what, forward_s
        ctx.save_for_backward(*others)
        timeline.sleep(f"{what} forward", forward_s)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        others = ctx.saved_tensors
        begin_s = time.perf_counter()
        zeros = [torch.zeros_like(tensor) for tensor in others]
        # Making the zeros counts as part of the compute.
        left_s = BACKWARD_PER_FORWARD * ctx.forward_s - (time.perf_counter() - begin_s)
        ctx.timeline.sleep(f"{ctx.what} backward", max(0.0, left_s))
        return None, None, None, gradients[0], *zeros
