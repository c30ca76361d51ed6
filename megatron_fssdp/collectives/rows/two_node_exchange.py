"""An exchange of rows as two autograd nodes, so that other compute runs between the start and the end.

A CPU rank runs one operator after the other, forward and backward. Rows travel beside compute only if the
exchange is started before this compute and awaited after it. One node for the whole exchange allows this in
the forward pass alone, because autograd runs the backward pass of a node in one piece::

    forward     depart: start the exchange    other compute    arrive: wait for the rows
    backward    depart: wait for gradients    other compute    arrive: start the exchange of gradients

Autograd runs the nodes that are ready in the opposite order of their forward pass. The backward pass of the
other compute is therefore between those of the two nodes, if its gradients are complete by then.

Shape letters: A rows that a rank sends, R rows that a rank receives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Arrival = Callable[[], tuple[Tensor, ...]]
"""Function that waits for an exchange which has been started, and returns the tensors that it delivers."""

Start = Callable[[Sequence[Tensor]], Arrival]
"""Function that starts an exchange of tensors which travel together."""


@dataclass(eq=False)
class TwoNodeExchange:
    """One exchange of rows, to be used for one forward pass and its backward pass.

    Every rank must call :meth:`depart` and then :meth:`arrive`, even without rows. The same holds for the
    backward pass, so each tensor must require a gradient on all ranks or on none.

    Attributes:
        start: Starts the exchange of the rows.
        start_back: Starts the exchange of the rows' gradients in the opposite direction. It gets the
            gradients of those tensors whose rows require a gradient.
    """

    start: Start
    start_back: Start
    _arrival: Arrival | None = field(init=False, default=None)
    _is_wanted: tuple[bool, ...] = field(init=False, default=())

    def depart(self, *rows: Tensor) -> Tensor:
        """Start the exchange.

        Args:
            rows: Tensors whose rows travel together, ``[A, ...]`` each.

        Returns:
            An empty tensor that stands for the rows under way; :meth:`arrive` takes it.
        """
        ticket: Tensor = _Depart.apply(self, *rows)
        return ticket

    def arrive(self, ticket: Tensor) -> tuple[Tensor, ...]:
        """Wait for the exchange and return what it delivers, ``[R, ...]`` for each tensor.

        Args:
            ticket: Result of :meth:`depart`.
        """
        rows: tuple[Tensor, ...] = _Arrive.apply(self, ticket)
        return rows

    def _take_arrival(self) -> tuple[Tensor, ...]:
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            raise RuntimeError(
                "the exchange has not been started: got arrive before depart, or a second backward pass; "
                "call depart first, and make a new exchange for each forward pass"
            )
        return arrival()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: TwoNodeExchange, *rows: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange._is_wanted = ctx.needs_input_grad[1:]
        exchange._arrival = exchange.start(rows)
        return rows[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        received = iter(ctx.exchange._take_arrival())
        return None, *(next(received) if is_wanted else None for is_wanted in ctx.exchange._is_wanted)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: TwoNodeExchange, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.save_for_backward(ticket)
        return exchange._take_arrival()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        exchange = ctx.exchange
        wanted = [x for x, is_wanted in zip(gradients, exchange._is_wanted, strict=True) if is_wanted]
        exchange._arrival = exchange.start_back(wanted)
        (ticket,) = ctx.saved_tensors
        return None, torch.zeros_like(ticket)
