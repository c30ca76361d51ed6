"""Kept exchanges with activation checkpoints, without Megatron: nesting, any order, and lifetime."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fssdp.runtime.execution import kept_exchanges
from megatron_fssdp.runtime.execution.kept_exchanges import RecomputedFunction


class Exchange:
    """Stands for a known exchange."""


class Checkpoint(torch.autograd.Function):
    """Reentrant recomputation in the manner of Megatron's ``CheckpointFunction``."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = RecomputedFunction(function)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return ctx.function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class Layers:
    """Layers that note which exchange each of their passes used."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, Any]] = []

    def run(self, layer: str, x: Tensor) -> Tensor:
        """One pass of a layer."""
        exchange = kept_exchanges.recall(layer)
        self.passes.append((layer, exchange))
        kept_exchanges.keep(layer, exchange or Exchange())  # type: ignore[arg-type]
        return x * 2

    def block(self, *layers: str) -> Callable[[Tensor], Tensor]:
        """A function that runs layers one after the other."""

        def run(x: Tensor) -> Tensor:
            for layer in layers:
                x = self.run(layer, x)
            return x

        return run


def checkpoint(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    output: Tensor = Checkpoint.apply(function, x)
    return output


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize("backwards", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_every_micro_batch_finds_its_own_exchanges_in_any_order(backwards: tuple[int, ...]) -> None:
    layers = Layers()
    kept: list[list[Any]] = []
    outputs = []
    for _ in range(3):
        noted: list[Any] = []
        kept.append(noted)

        def run(x: Tensor, noted: list[Any] = noted) -> Tensor:
            for layer in ("a", "b", "a"):  # One layer runs twice.
                x = layers.run(layer, x)
                noted.append(layers.passes[-1][1])
            return x

        outputs.append(checkpoint(run, leaf()))
    assert all(exchange is None for noted in kept for exchange in noted)
    firsts = []
    for output in outputs:
        node: Any = output.grad_fn
        of_layer = {layer: list(found) for layer, found in node.function._kept.items()}
        firsts.append([of_layer["a"][0], of_layer["b"][0], of_layer["a"][1]])
    for number in backwards:
        outputs[number].sum().backward()
        assert kept[number][3:] == firsts[number]


def test_nested_checkpoints_find_their_exchanges() -> None:
    layers = Layers()

    def outer(x: Tensor) -> Tensor:
        return layers.run("c", checkpoint(layers.block("b"), layers.run("a", x)))

    checkpoint(outer, leaf()).sum().backward()
    names = [layer for layer, _ in layers.passes]
    # First, the outer recomputation, and the inner recomputation in its backward pass.
    assert names == ["a", "b", "c", "a", "b", "c", "b"]
    found = [exchange for _, exchange in layers.passes]
    assert found[:3] == [None] * 3
    assert None not in found[3:]
    assert found[6] is found[4]


def test_passes_outside_a_checkpoint_and_of_other_checkpoints_find_nothing() -> None:
    layers = Layers()
    checkpoint(layers.block("a"), leaf())
    layers.run("a", leaf())
    checkpoint(layers.block("a"), leaf())
    assert [exchange for _, exchange in layers.passes] == [None] * 3


def test_an_exchange_is_found_once() -> None:
    layers = Layers()
    output = checkpoint(layers.block("a"), leaf()).sum()
    output.backward(retain_graph=True)
    output.backward()
    assert [exchange is None for _, exchange in layers.passes] == [True, False, True]


@pytest.mark.parametrize("runs_backward", [True, False])
def test_exchanges_are_freed_after_the_backward_pass_or_with_the_graph(runs_backward: bool) -> None:
    alive: list[weakref.ref[Exchange]] = []

    def run(x: Tensor) -> Tensor:
        exchange = kept_exchanges.recall("a") or Exchange()
        alive.append(weakref.ref(exchange))  # type: ignore[arg-type]
        kept_exchanges.keep("a", exchange)  # type: ignore[arg-type]
        return x * 2

    output: Tensor | None = checkpoint(run, leaf())
    assert alive[0]() is not None
    if runs_backward:
        assert output is not None
        output.sum().backward()  # The graph itself is still alive.
    else:
        output = None
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


def test_a_failed_pass_ends_its_scope() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        checkpoint(fail, leaf())
    assert not kept_exchanges._running.scopes
