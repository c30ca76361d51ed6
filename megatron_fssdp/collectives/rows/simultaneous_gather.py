"""SAA of Parm's schedule S2: an all-to-all of results with a simultaneous gather (Parm, §III-D, Fig. 5).

Under S2, the ranks of a tensor-parallel group divide their common rows. Each rank receives the results of its
own rows from the parts of the experts (EP&ESP-AlltoAll). All of these ranks need all results (MP-AllGather).
The results from one device are one slice. A rank passes each slice on while it receives the next one, so that
the all-to-all uses the links between nodes while the gather uses the links inside a node::

    all-to-all     slice 0   slice 1   slice 2
    gather                   slice 0   slice 1   slice 2

Slice 0 comes from the rank's own device, which needs no slow link; slice j comes from device ``own + j``.

Shape letters: A rows that a rank sends, D devices, X expert-tensor-parallel peers, R rows that a rank
receives, Y tensor-parallel ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.lane_streams import lane_stream
from megatron_fssdp.collectives.messages import exchange_in_batch, receive, send, wait_for
from megatron_fssdp.collectives.rows.sharded_all_to_all import ShardedRoute, add_parts, sum_from_parts
from megatron_fssdp.collectives.rows.uneven_all_gather import gather_rows

_RESULT_TAG, _GATHER_TAG = 6 << 16, 7 << 16  # They differ from the tags of other exchanges of these ranks.


@dataclass(frozen=True, eq=False)
class SharedRoute:
    """The routes of tensor-parallel ranks that have divided their common rows.

    Attributes:
        own: Route of this rank's rows.
        peers: Process group of the tensor-parallel ranks.
        send_YD: Number of rows that each tensor-parallel rank sends to each device, ``[Y, D]``.
        device_Y: Device number of each tensor-parallel rank, ``[Y]``.
    """

    own: ShardedRoute
    peers: dist.ProcessGroup
    send_YD: Sequence[Sequence[int]]
    device_Y: Sequence[int]

    def __post_init__(self) -> None:
        own = list(self.send_YD[self.peers.rank()])
        if own != list(self.own.send_D):
            raise ValueError(
                f"send_YD: got {own} rows of this rank for the devices, wanted its route's "
                f"{list(self.own.send_D)}; make both from the same dispatch"
            )

    @property
    def rows_Y(self) -> list[int]:
        """Number of rows of each tensor-parallel rank, ``[Y]``."""
        return [sum(send_D) for send_D in self.send_YD]

    def pieces(self, rows: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of rows ``[sum(rows_Y), ...]`` by tensor-parallel rank and device."""
        return [
            part.split(list(send_D))
            for part, send_D in zip(rows.split(self.rows_Y), self.send_YD, strict=True)
        ]

    def device_of(self, peer: int, step: int) -> int:
        """The device whose results a tensor-parallel rank receives in a step."""
        return (self.device_Y[peer] + step) % self.own.num_devices


def results_for_all(rows: Sequence[Tensor], route: SharedRoute, *, simultaneous: bool) -> tuple[Tensor, ...]:
    """Results for the rows of all tensor-parallel ranks, summed over the parts of the experts.

    It works without autograd. Every rank of both groups must call it.

    Args:
        rows: Tensors that travel together: results of this rank's part of the experts, ``[R, ...]`` each, in
            the order of sources.
        route: Routes of the rows; the results travel them in the opposite direction.
        simultaneous: Whether to pass results on slice by slice (SAA), or to run one collective after the
            other (AAS).

    Returns:
        The same number of tensors, ``[sum(rows_Y), ...]`` each, by tensor-parallel rank; the rows of a rank
        are in the order in which it sent them.
    """
    if not simultaneous or route.own.num_devices == 1:
        return tuple(
            gather_rows(summed, route.rows_Y, route.peers) for summed in sum_from_parts(rows, route.own)
        )
    slices = [_Slices.of(number, x.contiguous(), route) for number, x in enumerate(rows)]
    if slices[0].out.device.type == "cuda":
        _run_on_streams(slices, route)
    else:
        _run_on_host(slices, route)
    return tuple(found.out for found in slices)


Message = tuple[int, Tensor, int]
"""Rank of the other side, the tensor to send or to fill, and the message tag."""


@dataclass(frozen=True, eq=False)
class _Slices:
    """The messages of one tensor in each step.

    Attributes:
        number: Number of the tensor among those that travel together; part of the message tags.
        route: Routes of the rows of all tensor-parallel ranks.
        outgoing: Results of this rank's part of the experts, by the rank that receives them.
        partial: Views of ``memory`` by the rank whose partial results arrive in the view.
        memory: Memory for all partial results for this rank's rows, ``[X, A, ...]``.
        out: Memory for the sums for the rows of all tensor-parallel ranks, ``[sum(rows_Y), ...]``.
    """

    number: int
    route: SharedRoute
    outgoing: dict[int, Tensor]
    partial: dict[int, Tensor]
    memory: Tensor
    out: Tensor

    @classmethod
    def of(cls, number: int, rows: Tensor, route: SharedRoute) -> "_Slices":
        """Allocate memory for the results of one tensor and divide its rows ``[R, ...]`` into messages."""
        own = route.own
        memory = rows.new_empty(own.num_parts, sum(own.send_D), *rows.shape[1:])
        out = rows.new_empty(sum(route.rows_Y), *rows.shape[1:])
        return cls(number, route, own.by_source(rows), own.partial_results(memory), memory, out)

    def ranks(self, device: int) -> range:
        """The ranks of the parts of a device."""
        return range(device * self.route.own.num_parts, (device + 1) * self.route.own.num_parts)

    def sent(self, step: int) -> Iterator[Message]:
        """Messages with the results that this rank sends in a step."""
        own = self.route.own
        for rank in self.ranks((own.own_device - step) % own.num_devices):
            if rank != own.group.rank() and self.outgoing[rank].numel():
                yield rank, self.outgoing[rank], _RESULT_TAG + self.number

    def received(self, step: int) -> Iterator[Message]:
        """Messages with the partial results that this rank receives in a step."""
        own = self.route.own
        for rank in self.ranks((own.own_device + step) % own.num_devices):
            if rank != own.group.rank() and self.partial[rank].numel():
                yield rank, self.partial[rank], _RESULT_TAG + self.number

    def copy_own(self) -> None:
        """Copy the results that this rank has for its own rows; this is a part of the first step."""
        rank = self.route.own.group.rank()
        self.partial[rank].copy_(self.outgoing[rank])

    def add(self, step: int) -> Tensor:
        """Sum a step's partial results into ``out``, and return the piece of ``out`` that holds the sums."""
        route = self.route
        device = route.device_of(route.peers.rank(), step)
        piece = route.pieces(self.out)[route.peers.rank()][device]
        parts = [self.partial[rank] for rank in self.ranks(device)]
        piece.copy_(parts[0] if len(parts) == 1 else add_parts(torch.stack(parts)))
        return piece

    def handed_on(self, step: int, piece: Tensor) -> Iterator[Message]:
        """Messages that pass a step's sums on to all other tensor-parallel ranks."""
        for peer in range(self.route.peers.size()):
            if peer != self.route.peers.rank() and piece.numel():
                yield peer, piece, self._gather_tag(step)

    def gathered(self, step: int) -> Iterator[Message]:
        """Messages with the sums that this rank receives from the other tensor-parallel ranks in a step."""
        pieces_YD = self.route.pieces(self.out)
        for peer, pieces in enumerate(pieces_YD):
            piece = pieces[self.route.device_of(peer, step)]
            if peer != self.route.peers.rank() and piece.numel():
                yield peer, piece, self._gather_tag(step)

    def _gather_tag(self, step: int) -> int:
        return _GATHER_TAG + self.number * self.route.own.num_devices + step


def _run_on_host(slices: Sequence[_Slices], route: SharedRoute) -> None:
    """Run all steps on CPU tensors: the host posts messages and passes on the sums that are complete."""
    group, peers, num_steps = route.own.group, route.peers, route.own.num_devices
    incoming = [
        [receive(x, rank, group, tag) for part in slices for rank, x, tag in part.received(step)]
        for step in range(num_steps)
    ]
    gathered = [
        receive(x, peer, peers, tag)
        for step in range(num_steps)
        for part in slices
        for peer, x, tag in part.gathered(step)
    ]
    for part in slices:
        part.copy_own()
    sends: list[list[dist.Work]] = []
    handed_on: list[dist.Work] = []
    for step in range(num_steps + 1):
        if step < num_steps:
            # Post one step ahead, so that the link is not idle until this rank notices the end of a step.
            sends.append([send(x, rank, group, tag) for part in slices for rank, x, tag in part.sent(step)])
        if step:
            wait_for(incoming[step - 1])
            for part in slices:
                handed_on += [
                    send(x, peer, peers, tag) for peer, x, tag in part.handed_on(step - 1, part.add(step - 1))
                ]
            wait_for(sends[step - 1])
    wait_for(gathered)
    wait_for(handed_on)


def _run_on_streams(slices: Sequence[_Slices], route: SharedRoute) -> None:
    """Run all steps on CUDA tensors: the all-to-all uses one stream; sums and gather use another one."""
    device = slices[0].out.device
    exchanging = lane_stream("results", route.own.group, device)
    gathering = lane_stream("gather of results", route.peers, device)
    current = torch.cuda.current_stream(device)
    # ``slices`` refers to all tensors until the current stream has waited for both streams at the end. Their
    # memory therefore needs no ``record_stream``.
    for stream in (exchanging, gathering):
        stream.wait_stream(current)
    for step in range(route.own.num_devices):
        with torch.cuda.stream(exchanging):
            if not step:
                for part in slices:
                    part.copy_own()
            exchange_in_batch(
                [(rank, x) for part in slices for rank, x, _ in part.sent(step)],
                [(rank, x) for part in slices for rank, x, _ in part.received(step)],
                route.own.group,
            )
            arrived = exchanging.record_event()
        with torch.cuda.stream(gathering):
            gathering.wait_event(arrived)
            exchange_in_batch(
                [(peer, x) for part in slices for peer, x, _ in part.handed_on(step, part.add(step))],
                [(peer, x) for part in slices for peer, x, _ in part.gathered(step)],
                route.peers,
            )
    for stream in (exchanging, gathering):
        current.wait_stream(stream)
