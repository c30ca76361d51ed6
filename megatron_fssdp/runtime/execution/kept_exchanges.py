"""Keeps the exchange of a forward pass until activation recomputation runs the same forward pass again.

A recomputed forward pass sends the same rows to the same devices. With the kept exchange it gathers no
counts, and its host does not wait for the device. It also cannot differ from the first forward pass: a router
that rounds differently in the recomputation does not change the order of rows.

The kept exchanges belong to the function that an activation checkpoint calls twice. They are therefore found
under any order of micro-batches, pipeline stages and model chunks, and live no longer than the checkpoint::

    first call      layer 1 ── keep    layer 2 ── keep    layer 1 ── keep
    second call     layer 1 ── recall  layer 2 ── recall  layer 1 ── recall     (in the same order for a
    layer)

Checkpoints may be nested. A first call within a second call recalls from the outer function and keeps for the
inner one.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from megatron_fssdp.runtime.execution.known_exchange import KnownExchange


class RecomputedFunction:
    """A function that an activation checkpoint calls once and, in the backward pass, once more.

    Its first call keeps the exchanges of the layers that it runs. Later calls find them. An exchange is found
    once, so a third call exchanges counts again.

    Args:
        function: Function that runs the layers.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._kept: dict[Hashable, deque[KnownExchange]] = {}
        self._was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and keep or find the exchanges of its layers."""
        scope = _Scope(self._kept, is_again=self._was_called)
        self._was_called = True
        scopes = _running.scopes
        scopes.append(scope)
        try:
            return self._function(*args, **kwargs)
        finally:
            scopes.pop()
            if scope.is_again:
                self._kept.clear()


def keep(layer: Hashable, known: KnownExchange) -> None:
    """Keep the exchange of a forward pass for all checkpoints in whose first call it runs.

    Args:
        layer: Key of the layer.
        known: Exchange of the pass.
    """
    for scope in _running.scopes:
        if not scope.is_again:
            scope.kept.setdefault(layer, deque()).append(known)


def recall(layer: Hashable) -> KnownExchange | None:
    """The exchange of the first forward pass if the present pass recomputes it; ``None`` if it is not known.

    Args:
        layer: Key of the layer.
    """
    for scope in reversed(_running.scopes):
        if scope.is_again:
            kept = scope.kept.get(layer)
            return kept.popleft() if kept else None
    return None


@dataclass(frozen=True)
class _Scope:
    """A running call of a recomputed function.

    Attributes:
        kept: Exchanges of the function by layer, in the order of the passes.
        is_again: Whether this is not the function's first call.
    """

    kept: dict[Hashable, deque[KnownExchange]]
    is_again: bool


class _Running(threading.local):
    """The running calls of the present thread, outermost first. On CUDA, the backward pass has another."""

    def __init__(self) -> None:
        self.scopes: list[_Scope] = []


_running = _Running()
