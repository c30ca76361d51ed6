"""EP&ESP-AlltoAll of Parm's S1 and S2: rows to all parts of their experts, and sums of results back.

Expert tensor parallelism divides each expert into X parts on as many ranks. Schedule megatron runs an
all-to-all among the ranks of one part and then a gather among the parts. Here every rank sends its rows to
all parts itself. On the way back it receives a partial result from each part and adds them up: Parm's local
dump and local combine (§III-C). Each direction is the other's backward pass.

Ranks of the group are numbered as in Megatron: part ``x`` of device ``d`` is rank ``d * X + x``.
Shape letters: A rows that a rank sends, R rows that a rank receives, S ranks that send rows, D devices, X
expert-tensor-parallel peers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fssdp.collectives.messages import exchange, wait_for

_TO_TAG, _FROM_TAG = 4 << 16, 5 << 16  # apart from other exchanges of the same ranks


@dataclass(frozen=True, eq=False)
class ShardedRoute:
    """How many rows this rank sends to each device and receives from each source.

    Attributes:
        group: Process group of the ranks of all parts of all devices.
        num_parts: Number of parts of each expert, X.
        send_D: Rows of this rank for each device, ``[D]``; every part of the device gets all of them.
        receive_S: Rows from each source, by part, then device, ``[S]``.
    """

    group: dist.ProcessGroup
    num_parts: int
    send_D: Sequence[int]
    receive_S: Sequence[int]

    def __post_init__(self) -> None:
        size = self.group.size()
        if len(self.receive_S) != size or len(self.send_D) * self.num_parts != size:
            raise ValueError(
                f"got rows for {len(self.send_D)} devices of {self.num_parts} parts and from "
                f"{len(self.receive_S)} sources, wanted {size} ranks of the group in both"
            )

    @property
    def num_devices(self) -> int:
        """Devices that keep different experts."""
        return len(self.send_D)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank()

    @property
    def own_device(self) -> int:
        """This rank's device."""
        return self.group.rank() // self.num_parts

    def copies(self, rows: Tensor) -> dict[int, Tensor]:
        """Views of rows ``[A, ...]`` by the rank that gets them: all parts of a device the same ones."""
        pieces = rows.split(list(self.send_D))
        return {rank: pieces[rank // self.num_parts] for rank in range(self.group.size())}

    def partial_results(self, memory: Tensor) -> dict[int, Tensor]:
        """Views of memory ``[X, A, ...]`` by the rank whose partial results come there."""
        pieces_X = [part.split(list(self.send_D)) for part in memory]
        return {
            rank: pieces_X[rank % self.num_parts][rank // self.num_parts] for rank in range(self.group.size())
        }

    def by_source(self, rows: Tensor) -> dict[int, Tensor]:
        """Views of rows ``[R, ...]``, or of memory for them, by the rank that they are of."""
        return {
            source % self.num_devices * self.num_parts + source // self.num_devices: piece
            for source, piece in enumerate(rows.split(list(self.receive_S)))
        }


class _ToParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, route: ShardedRoute, meanwhile: Callable[[], object] | None, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route = route
        return send_to_parts(rows, route, meanwhile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        sent = [gradient for gradient, is_wanted in zip(gradients, wanted, strict=True) if is_wanted]
        received = iter(sum_from_parts(sent, ctx.route))
        return None, None, *(next(received) if is_wanted else None for is_wanted in wanted)


class _FromParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: ShardedRoute, rows: Tensor) -> Tensor:
        ctx.route = route
        return sum_from_parts((rows,), route)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, send_to_parts((gradient,), ctx.route)[0]


def rows_to_parts(
    rows: Sequence[Tensor], route: ShardedRoute, *, meanwhile: Callable[[], object] | None = None
) -> tuple[Tensor, ...]:
    """Every row to all parts of its device; backward sums what the parts find.

    Every rank of the group has to call it, also with no rows, and in backward too: each of ``rows``
    must require a gradient on all ranks or on none.

    Args:
        rows: Tensors that go together, ``[A, ...]`` each, by device.
        route: Where to.
        meanwhile: Work of the host to do while the rows travel; not in the backward pass.

    Returns:
        The same number of tensors, ``[R, ...]`` each, by part and device they came from.
    """
    received: tuple[Tensor, ...] = _ToParts.apply(route, meanwhile, *rows)
    return received


def results_from_parts(rows: Tensor, route: ShardedRoute) -> Tensor:
    """Sums of the parts' results for this rank's rows; backward sends every part the gradients.

    Every rank has to call it, under the same terms as :func:`rows_to_parts`.

    Args:
        rows: This part's results, ``[R, ...]``.
        route: The route of the rows, which is taken back.

    Returns:
        ``[A, ...]``.
    """
    results: Tensor = _FromParts.apply(route, rows)
    return results


def send_to_parts(
    rows: Sequence[Tensor], route: ShardedRoute, meanwhile: Callable[[], object] | None = None
) -> tuple[Tensor, ...]:
    """:func:`rows_to_parts` without gradients."""
    num_received = sum(route.receive_S)
    received = tuple(x.new_empty(num_received, *x.shape[1:]) for x in rows)
    works: list[dist.Work] = []
    for number, (out, x) in enumerate(zip(received, rows, strict=True)):
        works += _start(route.copies(x.contiguous()), route.by_source(out), route, _TO_TAG + number)
    if meanwhile is not None:
        meanwhile()
    wait_for(works)
    return received


def sum_from_parts(rows: Sequence[Tensor], route: ShardedRoute) -> tuple[Tensor, ...]:
    """:func:`results_from_parts` of several tensors, without gradients."""
    num_sent = sum(route.send_D)
    partial = [x.new_empty(route.num_parts, num_sent, *x.shape[1:]) for x in rows]
    works: list[dist.Work] = []
    for number, (out, x) in enumerate(zip(partial, rows, strict=True)):
        works += _start(
            route.by_source(x.contiguous()), route.partial_results(out), route, _FROM_TAG + number
        )
    wait_for(works)
    return tuple(add_parts(memory) for memory in partial)


def add_parts(memory: Tensor) -> Tensor:
    """Sum over the parts ``[X, ...]``, in their order; in half precision rounded once."""
    return memory[0] if len(memory) == 1 else memory.sum(dim=0)


def _start(
    outgoing: dict[int, Tensor], incoming: dict[int, Tensor], route: ShardedRoute, tag: int
) -> list[dist.Work]:
    if incoming[0].device.type != "cpu":
        size = route.group.size()
        work = dist.all_to_all(
            [incoming[rank] for rank in range(size)],
            [outgoing[rank] for rank in range(size)],
            group=route.group,
            async_op=True,
        )
        assert work is not None  # it is only outside the group
        return [work]
    return exchange(outgoing, incoming, route.group, tag)
