"""Other compute runs between the start of an exchange and the wait for it, in both directions."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megatron_fssdp.collectives.rows.two_node_exchange import Arrival, TwoNodeExchange


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, journal: list[str]) -> torch.Tensor:
        ctx.name, ctx.journal = name, journal
        journal.append(name)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.journal.append(f"{ctx.name} backward")
        return gradient * 2, None, None


def _multiplying(factor: float, name: str, journal: list[str]) -> Callable[[Sequence[torch.Tensor]], Arrival]:
    def start(tensors: Sequence[torch.Tensor]) -> Arrival:
        journal.append(f"start {name}")
        found = tuple(x * factor for x in tensors)

        def arrive() -> tuple[torch.Tensor, ...]:
            journal.append(f"wait for {name}")
            return found

        return arrive

    return start


def test_other_compute_is_between_start_and_wait() -> None:
    journal: list[str] = []
    exchange = TwoNodeExchange(_multiplying(3, "rows", journal), _multiplying(5, "gradients", journal))
    hidden = torch.ones(4, 2, requires_grad=True)
    probs = torch.ones(4)
    ticket = exchange.depart(hidden * 1, probs)
    other = _Noted.apply(hidden, "compute", journal)
    rows, row_probs = exchange.arrive(ticket)
    assert torch.equal(rows, torch.full((4, 2), 3.0))
    assert torch.equal(row_probs, torch.full((4,), 3.0))
    (rows + other).sum().backward()
    assert journal == [
        *("start rows", "compute", "wait for rows"),
        *("start gradients", "compute backward", "wait for gradients"),
    ]
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.full((4, 2), 5.0 + 2.0))


def test_only_the_wanted_gradients_travel() -> None:
    sizes: list[int] = []

    def start_back(tensors: Sequence[torch.Tensor]) -> Arrival:
        sizes.append(len(tensors))
        return lambda: tuple(tensors)

    exchange = TwoNodeExchange(lambda tensors: lambda: tuple(x.clone() for x in tensors), start_back)
    probs = torch.ones(4, requires_grad=True)
    _, row_probs = exchange.arrive(exchange.depart(torch.ones(4, 2), probs))
    row_probs.sum().backward()
    assert sizes == [1]
    assert torch.equal(probs.grad, torch.ones(4))


def test_an_arrival_without_a_departure_is_refused() -> None:
    exchange = TwoNodeExchange(lambda tensors: lambda: tuple(tensors), lambda tensors: lambda: tuple(tensors))
    with pytest.raises(RuntimeError, match="call depart first"):
        exchange.arrive(torch.empty(0))
