"""SAA of Parm's schedule S2: an all-to-all of results with a simultaneous gather (Parm, §III-D, Fig. 5).

Under S2 the ranks of a tensor-parallel group divide their common rows. Each rank receives the results of its
own rows from the parts of the experts (EP&ESP-AlltoAll), and all of them need all results (MP-AllGather).
The results of one device are one slice. Each slice is handed on while the next slice travels, so that the
all-to-all uses the links between nodes and the gather uses those inside a node. The own device's slice,
which needs no slow link, comes first.

Shape letters: A rows that a rank sends, D devices, X expert-tensor-parallel peers, R rows that a rank
receives, Y tensor-parallel ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import exchange_in_batch, receive, send, wait_for
from megatron_fssdp.collectives.rows.sharded_all_to_all import ShardedRoute, add_parts, sum_from_parts
from megatron_fssdp.collectives.rows.uneven_all_gather import gather_rows

_RESULT_TAG, _GATHER_TAG = 6 << 16, 7 << 16  # apart from other exchanges of the same ranks


@dataclass(frozen=True, eq=False)
class SharedRoute:
    """The routes of tensor-parallel ranks that have divided their common rows.

    Attributes:
        own: The route of this rank's rows.
        peers: Process group of the tensor-parallel ranks.
        send_YD: Rows that each tensor-parallel rank sends to each device, ``[Y, D]``.
        device_Y: Device that each tensor-parallel rank belongs to, ``[Y]``.
    """

    own: ShardedRoute
    peers: dist.ProcessGroup
    send_YD: Sequence[Sequence[int]]
    device_Y: Sequence[int]

    def __post_init__(self) -> None:
        own = list(self.send_YD[self.peers.rank()])
        if own != list(self.own.send_D):
            raise ValueError(
                f"got {own} rows of this rank for the devices, wanted its route's {list(self.own.send_D)}"
            )

    @property
    def rows_Y(self) -> list[int]:
        """Rows of each tensor-parallel rank."""
        return [sum(send_D) for send_D in self.send_YD]

    def pieces(self, rows: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of rows ``[sum(rows_Y), ...]`` by tensor-parallel rank and device."""
        return [
            part.split(list(send_D))
            for part, send_D in zip(rows.split(self.rows_Y), self.send_YD, strict=True)
        ]

    def device_of(self, peer: int, step: int) -> int:
        """Whose results a tensor-parallel rank gets in a step."""
        return (self.device_Y[peer] + step) % self.own.num_devices


def results_for_all(rows: Sequence[Tensor], route: SharedRoute, *, simultaneous: bool) -> tuple[Tensor, ...]:
    """Sums of the parts' results for the rows of all tensor-parallel ranks; without gradients.

    Every rank of both groups has to call it.

    Args:
        rows: Tensors that go together: this part's results, ``[R, ...]`` by source.
        route: The routes of the rows, which are taken back.
        simultaneous: Slice by slice (SAA); else one collective after the other (AAS).

    Returns:
        As many tensors, ``[sum(rows_Y), ...]``: by tensor-parallel rank, each in its order of sending.
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
"""The other rank, what goes, and a tag."""


@dataclass(frozen=True, eq=False)
class _Slices:
    """One tensor's messages, by step.

    Attributes:
        number: Of the tensor, for tags.
        route: The routes.
        outgoing: Results by the rank that they are sent to.
        partial: Memory for partial results by the rank that they come from.
        memory: The same as one tensor, ``[X, A, ...]``.
        out: Memory for everybody's sums.
    """

    number: int
    route: SharedRoute
    outgoing: dict[int, Tensor]
    partial: dict[int, Tensor]
    memory: Tensor
    out: Tensor

    @classmethod
    def of(cls, number: int, rows: Tensor, route: SharedRoute) -> "_Slices":
        own = route.own
        memory = rows.new_empty(own.num_parts, sum(own.send_D), *rows.shape[1:])
        out = rows.new_empty(sum(route.rows_Y), *rows.shape[1:])
        return cls(number, route, own.by_source(rows), own.partial_results(memory), memory, out)

    def ranks(self, device: int) -> range:
        """The parts of a device."""
        return range(device * self.route.own.num_parts, (device + 1) * self.route.own.num_parts)

    def sent(self, step: int) -> Iterator[Message]:
        """Results of this part that go out in a step."""
        own = self.route.own
        for rank in self.ranks((own.own_device - step) % own.num_devices):
            if rank != own.group.rank() and self.outgoing[rank].numel():
                yield rank, self.outgoing[rank], _RESULT_TAG + self.number

    def received(self, step: int) -> Iterator[Message]:
        """Memory for partial results that come in a step."""
        own = self.route.own
        for rank in self.ranks((own.own_device + step) % own.num_devices):
            if rank != own.group.rank() and self.partial[rank].numel():
                yield rank, self.partial[rank], _RESULT_TAG + self.number

    def copy_own(self) -> None:
        """What this rank has for itself; in the first step."""
        rank = self.route.own.group.rank()
        self.partial[rank].copy_(self.outgoing[rank])

    def add(self, step: int) -> Tensor:
        """Sum a step's partial results into everybody's memory; that piece of it."""
        route = self.route
        device = route.device_of(route.peers.rank(), step)
        piece = route.pieces(self.out)[route.peers.rank()][device]
        parts = [self.partial[rank] for rank in self.ranks(device)]
        piece.copy_(parts[0] if len(parts) == 1 else add_parts(torch.stack(parts)))
        return piece

    def handed_on(self, step: int, piece: Tensor) -> Iterator[Message]:
        """The sums of a step, to all other tensor-parallel ranks."""
        for peer in range(self.route.peers.size()):
            if peer != self.route.peers.rank() and piece.numel():
                yield peer, piece, self._gather_tag(step)

    def gathered(self, step: int) -> Iterator[Message]:
        """Memory for the sums of the other tensor-parallel ranks in a step."""
        pieces_YD = self.route.pieces(self.out)
        for peer, pieces in enumerate(pieces_YD):
            piece = pieces[self.route.device_of(peer, step)]
            if peer != self.route.peers.rank() and piece.numel():
                yield peer, piece, self._gather_tag(step)

    def _gather_tag(self, step: int) -> int:
        return _GATHER_TAG + self.number * self.route.own.num_devices + step


def _run_on_host(slices: Sequence[_Slices], route: SharedRoute) -> None:
    """CPU: messages run by themselves; the host sends one step ahead and hands on what has come."""
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
            # One step ahead, so that the link does not wait for this rank to notice an end.
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


_streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}


def _run_on_streams(slices: Sequence[_Slices], route: SharedRoute) -> None:
    """CUDA: the all-to-all's messages on one stream, sums and the gather's on another."""
    device = slices[0].out.device
    exchanging, gathering = _streams.setdefault(
        device, (torch.cuda.Stream(device), torch.cuda.Stream(device))
    )
    current = torch.cuda.current_stream(device)
    for stream in (exchanging, gathering):
        stream.wait_stream(current)
        for part in slices:
            for tensor in (part.memory, part.out, *part.outgoing.values()):
                tensor.record_stream(stream)
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
