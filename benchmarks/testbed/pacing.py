"""Compute that takes the time of a stated throughput, and none of the machine's cores.

Ranks outnumber cores, and a busy rank would borrow the cores of an idle one: imbalance would not
show. So attention and experts sleep for their FLOPs over a stated rate, forward and backward, while every
tensor that would move, gradients of weights included, exists in its right size.

Shape legend: T tokens, M model dim.
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
    """What one rank did, for traces: name, begin and end on ``time.perf_counter``'s clock."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Note what runs inside."""
        begin_s = time.perf_counter()
        yield
        self.spans.append((what, begin_s, time.perf_counter()))

    def sleep(self, what: str, seconds: float) -> None:
        """Sleep, and note it."""
        begin_s = time.perf_counter()
        time.sleep(seconds)
        self.spans.append((what, begin_s, time.perf_counter()))


def paced(hidden: torch.Tensor, forward_s: float, timeline: Timeline, what: str) -> torch.Tensor:
    """The hidden states after compute of a given forward time; the backward pass takes twice that."""
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
    """Rows of the experts' results, in the time of their forward pass.

    Args:
        rows: ``[T, M]``.
        probs: ``[T]``; get a gradient, as they would.
        weights: Of all present experts; get gradients of zeros.
        forward_s: Seconds of the forward pass; the backward pass takes twice that.
        timeline: Where to note it.
        what: Under which name.
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
        # Making them is part of the compute.
        left_s = BACKWARD_PER_FORWARD * ctx.forward_s - (time.perf_counter() - begin_s)
        ctx.timeline.sleep(f"{ctx.what} backward", max(0.0, left_s))
        return None, None, None, gradients[0], *zeros
