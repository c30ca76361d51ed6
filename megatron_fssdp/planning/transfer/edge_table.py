"""The edges of a transfer plan, as a table of numbers that also reads like a tuple."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from megatron_fssdp.planning.arrays import frozen_array


class TransferEdge(NamedTuple):
    """The transfer of one expert's parameters from one device to another.

    Attributes:
        expert: Number of the expert.
        source: Device that sends. It has the expert before.
        destination: Device that receives.
        depth: Number of transfers that must come before this one, counted from the device that had the expert
            at the start (the owner, in most plans).
    """

    expert: int
    source: int
    destination: int
    depth: int


class EdgeTable(Sequence[TransferEdge]):
    """Edges in an order. Edges are made at their first use, because prices need only the table.

    Attributes:
        table: Expert, source, destination and depth of each edge, int64 with four columns, read-only.
    """

    def __init__(self, edges: "np.ndarray | Iterable[TransferEdge]") -> None:
        if isinstance(edges, np.ndarray):
            self.table = edges
        else:
            self._edges = tuple(edges)
            self.table = frozen_array(np.array(self._edges, np.int64).reshape(-1, 4), np.int64)

    @cached_property
    def _edges(self) -> tuple[TransferEdge, ...]:
        return tuple(map(TransferEdge._make, self.table.tolist()))

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[TransferEdge]:
        return iter(self._edges)

    @overload
    def __getitem__(self, index: int) -> TransferEdge: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TransferEdge, ...]: ...
    def __getitem__(self, index: int | slice) -> TransferEdge | tuple[TransferEdge, ...]:
        return self._edges[index]

    def __eq__(self, other: object) -> bool:
        return self._edges == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._edges)

    def __repr__(self) -> str:
        return repr(self._edges)
