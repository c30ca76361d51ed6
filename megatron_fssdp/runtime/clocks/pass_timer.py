"""Measures how long each part of a layer's forward and backward passes takes, on the device's clock.

A rank runs its passes as one sequence of parts, so the moments at which parts begin are enough: a part ends
where the next one begins. The backward pass marks the same places in reverse order, by hooks on tensors whose
gradients are complete there::

    forward    other ──► dispatch ──► experts ──► combine ──► (outside of the layer)
    backward   other ◄── dispatch ◄── experts ◄── combine ◄── (outside of the layer)

Moments in which compute waits for replicas' weights or gradients belong to no part: the timers of transfers
measure them (``TransferTimer.seconds``). Those of a dispatch beside a gather, which delays it on the same
links, are the gather's as well (:meth:`PassTimer.take_from_dispatch`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Literal

import torch

from megatron_fssdp.collectives.device_clock import Moment, now, seconds_between
from megatron_fssdp.collectives.transfer_lanes import TransferTimer
from megatron_fssdp.runtime.slots.autograd_points import in_backward

Part = Literal["other", "dispatch", "experts", "combine"]


@dataclass
class PassSeconds:
    """Seconds of the parts of one layer, summed over the forward or the backward passes of an iteration."""

    other_s: float = 0.0  # until the dispatch: attention, the gate, and shared experts that do not overlap
    # From the exchange of counts to the sorted rows, with the layer's plan; in steps, with the combine too.
    dispatch_s: float = 0.0
    experts_s: float = 0.0
    combine_s: float = 0.0  # with the wait for slower ranks
    experts_slowest_s: float = 0.0  # on the slowest of the ranks that were combined

    @property
    def is_measured(self) -> bool:
        """Whether any part took time."""
        return any(astuple(self))

    @staticmethod
    def combined(of_ranks: "Sequence[PassSeconds]") -> "PassSeconds":
        """Return the means over at least one rank, and the slowest experts."""
        means = [sum(parts) / len(of_ranks) for parts in zip(*map(astuple, of_ranks), strict=True)]
        slowest_s = max(record.experts_slowest_s for record in of_ranks)
        return replace(PassSeconds(*means), experts_slowest_s=slowest_s)

    def add(self, part: Part, seconds: float) -> None:
        """Add seconds to a part."""
        setattr(self, f"{part}_s", getattr(self, f"{part}_s") + seconds)
        self.experts_slowest_s = self.experts_s


class PassTimer:
    """The sequence of parts that all layers of a rank share. It runs from the begin to the end of iterations.

    It is not usable if passes are no sequence: Megatron's combined 1F1B schedule runs segments of two
    micro-batches in turn, on two streams.
    """

    def __init__(self) -> None:
        self.is_usable = True
        self.is_running = False
        self._is_cuda = False
        self._marks: list[tuple[PassSeconds | None, Part | None, Moment]] = []
        # Of the last measured iteration, by the identity of their total.
        self._dispatches: dict[int, list[tuple[Moment, Moment]]] = {}

    def start(self, *, is_cuda: bool = False) -> None:
        """Begin to measure an iteration; what was measured since the last start is dropped."""
        self._marks.clear()
        self._dispatches.clear()
        self.is_running, self._is_cuda = self.is_usable, is_cuda

    def stop(self) -> None:
        """End the iteration, and add the seconds of every part to its layer; on CUDA, the host waits."""
        self.is_running = False
        for (total, part, begin), (_, _, end) in pairwise(self._marks):
            if total is not None and part is not None:
                total.add(part, seconds_between(begin, end))
                if part == "dispatch":
                    self._dispatches.setdefault(id(total), []).append((begin, end))
        self._marks.clear()

    def take_from_dispatch(self, total: PassSeconds, gather: TransferTimer) -> float:
        """Take the seconds of a gather beside the dispatches of ``total`` from these, and return them.

        The timer must have stopped. A rank computes nothing in a dispatch but shared experts that overlap, so
        hardly anything hides these seconds.
        """
        beside_s = sum(gather.beside_s(*dispatch) for dispatch in self._dispatches.get(id(total), ()))
        total.dispatch_s -= beside_s
        return beside_s

    def enter(self, total: PassSeconds | None, part: Part | None) -> None:
        """Mark that a part begins now, whose seconds are added to ``total``, and that the last one ends.

        Both are ``None`` outside of all parts.
        """
        self._marks.append((total, part, now(self._is_cuda)))

    def border(
        self,
        seconds: tuple[PassSeconds, PassSeconds],
        tensor: torch.Tensor,
        forward: Part | None,
        backward: Part | None,
    ) -> None:
        """Mark a border between two parts of a layer, in this pass and in the backward pass to come.

        The parts ``forward`` and ``backward`` begin there, or the layer ends if they are ``None``. Its
        ``seconds`` are those of forward and of backward passes. The timer must be running. A forward pass
        that is recomputed counts as a part of the backward pass, which reaches the border when the gradient
        of ``tensor`` is complete.
        """

        def enter_backward(_: torch.Tensor) -> None:
            if self.is_running:
                self.enter(seconds[1], backward)

        self.enter(seconds[in_backward()], forward)
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(enter_backward)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager around a wait for a transfer, which belongs to no part."""
        if not self.is_running or not self._marks:
            yield
            return
        total, part, _ = self._marks[-1]
        self.enter(None, None)
        yield
        self.enter(total, part)
