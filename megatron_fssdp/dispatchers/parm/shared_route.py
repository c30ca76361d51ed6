"""EP&ESP-AlltoAll of rows that tensor-parallel ranks have divided, and SAA on the way back.

Each tensor-parallel rank receives the results of its own rows from the parts of the experts, and all of these
ranks need all results (MP-AllGather). The results from one device are one slice. A rank passes a slice on while
it receives the next one, so that the all-to-all uses the links between nodes while the gather uses the links
inside a node (Parm, §III-D, Fig. 5)::

    all-to-all     slice 0   slice 1   slice 2
    gather                   slice 0   slice 1   slice 2

Slice 0 comes from the rank's own device, which needs no slow link; slice j comes from device ``own + j``.

Shape letters: D devices, R rows that a rank receives, S ranks that send rows, X expert-tensor-parallel peers,
Y tensor-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from megatron_fssdp.dispatchers.parm.dual_collectives import gather_rows
from megatron_fssdp.dispatchers.parm.parm_groups import ParmGroups

_RESULT_TAG, _GATHER_TAG = 8 << 16, 9 << 16  # They differ from the tags of other messages of these ranks.

Message = tuple[int, Tensor]
"""Rank of the other side, and the tensor to send or to fill."""


@dataclass(frozen=True, eq=False)
class SharedRoute:
    """How many rows tensor-parallel ranks exchange with the parts of the experts.

    It works without autograd. Every rank of both groups must call each method, even without rows.

    Attributes:
        groups: Process groups of the layer; ``groups.tensor_parallel`` have divided their common rows.
        device_Y: Device number of each tensor-parallel rank, ``[Y]``.
        send_YD: Number of rows that each tensor-parallel rank sends to each device, ``[Y, D]``. Every part of
            the device receives all of them.
        receive_S: Number of rows that this rank receives from each rank of all parts, ``[S]``.
        on_nccl_stream: Whether all-to-alls run on NCCL's stream, beside shared experts.
    """

    groups: ParmGroups
    device_Y: Sequence[int]
    send_YD: list[list[int]]
    receive_S: list[int]
    on_nccl_stream: bool = False

    @property
    def rank(self) -> int:
        """This rank's number among the tensor-parallel ranks."""
        return self.groups.tensor_parallel.rank()

    @property
    def rows_Y(self) -> list[int]:
        """Number of rows of each tensor-parallel rank, ``[Y]``."""
        return [sum(send_D) for send_D in self.send_YD]

    @property
    def _sent_S(self) -> list[int]:
        return [number for number in self.send_YD[self.rank] for _ in range(self.groups.num_parts)]

    def send(self, rows: Tensor) -> Tensor:
        """Send this rank's rows, in the order of devices, to all parts of the devices.

        Returns:
            Received rows ``[R, ...]`` in the order of the ranks of all parts.
        """
        num_parts = self.groups.num_parts
        if num_parts > 1:
            pieces = rows.split(self.send_YD[self.rank])
            rows = torch.cat([piece for piece in pieces for _ in range(num_parts)])
        sizes = self.receive_S, self._sent_S
        received: Tensor = all_to_all(self.groups.all_parts, rows, *sizes, self.on_nccl_stream)
        return received

    def collect(self, rows: Sequence[Tensor], *, simultaneous: bool) -> list[Tensor]:
        """Return results for the rows of all tensor-parallel ranks, summed over the parts of the experts.

        Args:
            rows: Tensors that travel together: results of this rank's part of the experts, ``[R, ...]`` each,
                in the order in which the rows came.
            simultaneous: Whether to pass results on slice by slice (SAA), or to run one collective after the
                other (AAS).

        Returns:
            One tensor ``[sum(rows_Y), ...]`` for each of ``rows``, by tensor-parallel rank; the rows of a
            rank are in the order in which it sent them.
        """
        if simultaneous and self.groups.num_devices > 1:
            return self._collect_slices(rows)
        return [gather_rows(self._own_sums(x), self.rows_Y, self.groups.tensor_parallel) for x in rows]

    def _own_sums(self, rows: Tensor) -> Tensor:
        """Results for this rank's own rows, summed over the parts."""
        sizes = self._sent_S, self.receive_S
        partial: Tensor = all_to_all(self.groups.all_parts, rows, *sizes, self.on_nccl_stream)
        if self.groups.num_parts == 1:
            return partial
        pieces, num_parts = partial.split(self._sent_S), self.groups.num_parts
        devices = range(0, len(pieces), num_parts)
        return torch.cat([torch.stack(pieces[first : first + num_parts]).sum(dim=0) for first in devices])

    def _collect_slices(self, rows: Sequence[Tensor]) -> list[Tensor]:
        groups, num_parts, num_steps = self.groups, self.groups.num_parts, self.groups.num_devices
        own, device = self.rank, groups.devices.rank()
        slices = [_Slices.of(x.contiguous(), self) for x in rows]

        def arrive(step: int) -> list[dist.Work]:
            """Start the second all-to-all's messages of a step."""
            target, source = (
                [other % num_steps * num_parts + part for part in range(num_parts)]
                for other in (device - step, device + step)
            )
            sent = [(rank, x.outgoing[rank]) for x in slices for rank in target]
            received = [
                (rank, x.partial_DX[rank // num_parts][rank % num_parts]) for x in slices for rank in source
            ]
            return _post(sent, received, groups.all_parts, _RESULT_TAG)

        def hand_on(step: int) -> list[dist.Work]:
            """Add the parts that have arrived in a step, and start the gather's messages."""
            source = (device + step) % num_steps
            if num_parts > 1:
                for x in slices:
                    torch.sum(x.partial_DX[source], dim=0, out=x.pieces_YD[own][source])
            others = [peer for peer in range(len(self.send_YD)) if peer != own]
            sent = [(peer, x.pieces_YD[own][source]) for x in slices for peer in others]
            step_Y = [(device + step) % num_steps for device in self.device_Y]
            received = [(peer, x.pieces_YD[peer][step_Y[peer]]) for x in slices for peer in others]
            return _post(sent, received, groups.tensor_parallel, _GATHER_TAG)

        # A step is posted before the one before it is awaited, so that the links between nodes stay busy. On
        # CUDA, ``wait`` lets the current stream wait, and each process group has a stream of its own.
        arriving, handed_on = arrive(0), list[dist.Work]()
        for step in range(num_steps):
            following = arrive(step + 1) if step + 1 < num_steps else []
            for work in arriving:
                work.wait()
            handed_on += hand_on(step)
            arriving = following
        for work in handed_on:
            work.wait()
        return [x.sums for x in slices]


@dataclass(frozen=True, eq=False)
class _Slices:
    """One tensor's views for the messages of SAA.

    Attributes:
        outgoing: Results of this rank's part of the experts, by the rank that receives them.
        sums: Memory for the results for the rows of all tensor-parallel ranks.
        pieces_YD: Views of ``sums`` by tensor-parallel rank and device.
        partial_DX: Memory for the partial results for this rank's rows, ``[X, ...]`` for each device. Whole
            results arrive in ``sums``.
    """

    outgoing: Sequence[Tensor]
    sums: Tensor
    pieces_YD: list[Sequence[Tensor]]
    partial_DX: list[Tensor]

    @classmethod
    def of(cls, rows: Tensor, route: SharedRoute) -> "_Slices":
        sums = rows.new_empty(sum(route.rows_Y), *rows.shape[1:])
        by_rank = zip(sums.split(route.rows_Y), route.send_YD, strict=True)
        pieces_YD: list[Sequence[Tensor]] = [part.split(send_D) for part, send_D in by_rank]
        parts, own_D = route.groups.num_parts, pieces_YD[route.rank]
        partial = [x[None] if parts == 1 else x.new_empty(parts, *x.shape) for x in own_D]
        return cls(rows.split(route.receive_S), sums, pieces_YD, partial)


def _post(
    sent: list[Message], received: list[Message], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Start messages as one batch, and copy this rank's own part. Empty ones, which NCCL refuses, are left out."""
    own = group.rank()
    for (_, x), (_, memory) in zip(
        *([m for m in side if m[0] == own] for side in (sent, received)), strict=True
    ):
        memory.copy_(x)
    operations = [
        dist.P2POp(call, x, group=group, tag=tag, group_peer=rank)
        for call, messages in ((dist.isend, sent), (dist.irecv, received))
        for rank, x in messages
        if rank != own and x.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []
