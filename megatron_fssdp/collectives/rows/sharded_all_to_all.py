"""EP&ESP-AlltoAll of Parm's S1 and S2: rows to all parts of their experts, and sums of results back.

Expert tensor parallelism divides each expert into X parts on X ranks. Schedule ``megatron`` runs an
all-to-all among the ranks of one part and then a gather among the parts. Here, every rank sends its rows
directly to all parts. On the way back, it receives a partial result from each part and adds them: Parm's
local dump and local combine (§III-C). Each direction is the backward pass of the other.

The ranks of the group have Megatron's order: part ``x`` of device ``d`` is rank ``d * X + x``. For three
devices and X = 2::

                  device 0    device 1    device 2
    part 0         rank 0      rank 2      rank 4
    part 1         rank 1      rank 3      rank 5

    A row of rank 2 for an expert of device 0 goes to ranks 0 and 1; rank 2 adds their two partial results.

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
from megatron_fssdp.collectives.rows.two_node_exchange import Arrival

_TO_TAG, _FROM_TAG = 4 << 16, 5 << 16  # They differ from the tags of other exchanges of the same ranks.


@dataclass(frozen=True, eq=False)
class ShardedRoute:
    """How many rows this rank sends to each device and receives from each source.

    Attributes:
        group: Process group of the ranks of all parts of all devices.
        num_parts: Number of parts of each expert, X.
        send_D: Number of rows that this rank sends to each device, ``[D]``. Every part of the device receives
            all of them.
        receive_S: Number of rows that this rank receives from each source, by part, then device, ``[S]``.
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
                f"{len(self.receive_S)} sources, wanted {size} ranks of the group in both: pass one number "
                "for each device and one for each source"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices, D; different devices have different experts."""
        return len(self.send_D)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank()

    @property
    def own_device(self) -> int:
        """Number of this rank's device."""
        return self.group.rank() // self.num_parts

    def copies(self, rows: Tensor) -> dict[int, Tensor]:
        """Views of rows ``[A, ...]`` by receiving rank; all parts of a device receive the same rows."""
        pieces = rows.split(list(self.send_D))
        return {rank: pieces[rank // self.num_parts] for rank in range(self.group.size())}

    def partial_results(self, memory: Tensor) -> dict[int, Tensor]:
        """Views of memory ``[X, A, ...]`` by the rank whose partial results arrive in the view."""
        pieces_X = [part.split(list(self.send_D)) for part in memory]
        return {
            rank: pieces_X[rank % self.num_parts][rank // self.num_parts] for rank in range(self.group.size())
        }

    def by_source(self, rows: Tensor) -> dict[int, Tensor]:
        """Views of received rows ``[R, ...]``, or of memory for them, by the rank that sends the rows."""
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
    """Send every row to all parts of its device; the backward pass sums the gradients from the parts.

    Every rank of the group must call it, even without rows. The same holds for the backward pass, so each
    tensor of ``rows`` must require a gradient on all ranks or on none.

    Args:
        rows: Tensors whose rows travel together, ``[A, ...]`` each, in the order of destination devices.
        route: Number of rows between this rank and every other rank.
        meanwhile: Work for the host to do while the rows travel, in the forward pass only.

    Returns:
        The same number of tensors, ``[R, ...]`` each, in the order of sources: by part, then device.
    """
    received: tuple[Tensor, ...] = _ToParts.apply(route, meanwhile, *rows)
    return received


def results_from_parts(rows: Tensor, route: ShardedRoute) -> Tensor:
    """Return results to the ranks of their rows and sum those of all parts of an expert.

    The backward pass sends the gradients to every part. Every rank must call it, under the conditions of
    :func:`rows_to_parts`.

    Args:
        rows: Results of this rank's part of the experts, ``[R, ...]``.
        route: Route of the rows; the results travel it in the opposite direction.

    Returns:
        Results for the rows that this rank sent, ``[A, ...]``.
    """
    results: Tensor = _FromParts.apply(route, rows)
    return results


def send_to_parts(
    rows: Sequence[Tensor], route: ShardedRoute, meanwhile: Callable[[], object] | None = None
) -> tuple[Tensor, ...]:
    """Do the same as :func:`rows_to_parts`, without autograd."""
    arrival = start_to_parts(rows, route)
    if meanwhile is not None:
        meanwhile()
    return arrival()


def start_to_parts(rows: Sequence[Tensor], route: ShardedRoute) -> Arrival:
    """Start what :func:`send_to_parts` does, and return the function that waits for its result."""
    num_received = sum(route.receive_S)
    sent = [x.contiguous() for x in rows]
    received = tuple(x.new_empty(num_received, *x.shape[1:]) for x in rows)
    works: list[dist.Work] = []
    for number, (out, x) in enumerate(zip(received, sent, strict=True)):
        works += _start(route.copies(x), route.by_source(out), route, _TO_TAG + number)

    def arrive() -> tuple[Tensor, ...]:
        wait_for(works)
        sent.clear()  # Messages read this memory until here.
        return received

    return arrive


def sum_from_parts(rows: Sequence[Tensor], route: ShardedRoute) -> tuple[Tensor, ...]:
    """Do the same as :func:`results_from_parts` for several tensors, without autograd."""
    return start_from_parts(rows, route)()


def start_from_parts(rows: Sequence[Tensor], route: ShardedRoute) -> Arrival:
    """Start what :func:`sum_from_parts` does, and return the function that waits for its result."""
    num_sent = sum(route.send_D)
    sent = [x.contiguous() for x in rows]
    partial = [x.new_empty(route.num_parts, num_sent, *x.shape[1:]) for x in rows]
    works: list[dist.Work] = []
    for number, (out, x) in enumerate(zip(partial, sent, strict=True)):
        works += _start(route.by_source(x), route.partial_results(out), route, _FROM_TAG + number)

    def arrive() -> tuple[Tensor, ...]:
        wait_for(works)
        sent.clear()  # Messages read this memory until here.
        return tuple(add_parts(memory) for memory in partial)

    return arrive


def add_parts(memory: Tensor) -> Tensor:
    """Sum the parts' results ``[X, ...]`` in the order of parts; half precision is rounded only once."""
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
        assert work is not None  # It is None only on ranks outside the group.
        return [work]
    return exchange(outgoing, incoming, route.group, tag)
