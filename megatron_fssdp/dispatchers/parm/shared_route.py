"""EP&ESP-AlltoAll of rows that tensor-parallel ranks have divided, and SAA on the way back.

Each tensor-parallel rank receives the results of its own rows from the parts of the experts, and all of
these ranks need all results (MP-AllGather). The results from one device are one slice. A rank passes a slice
on while it receives the next one, so that the all-to-all uses the links between nodes while the gather uses
the links inside a node (Parm, §III-D, Fig. 5)::

    all-to-all     slice 0   slice 1   slice 2
    gather                   slice 0   slice 1   slice 2

Slice 0 comes from the rank's own device, which needs no slow link; slice j comes from device ``own + j``.

Shape letters: D devices, R rows that a rank receives, S ranks that send rows, X expert-tensor-parallel peers,
Y tensor-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from megatron_fssdp.collectives.messages import start_exchange, wait_for
from megatron_fssdp.dispatchers.parm.dual_collectives import gather_rows

_RESULT_TAG, _GATHER_TAG = 8 << 16, 9 << 16  # They differ from the tags of other messages of these ranks.


@dataclass(frozen=True, eq=False)
class SharedRoute:
    """How many rows tensor-parallel ranks exchange with the parts of the experts.

    It works without autograd. Every rank of both groups must call each method, even without rows.
    """

    pg: Any  # Megatron's process groups
    device_Y: Sequence[int]  # device number of each tensor-parallel rank
    send_YD: list[list[int]]  # rows that each tensor-parallel rank sends to every part of each device
    receive_S: list[int]  # rows that this rank receives from each rank of all parts

    @property
    def rank(self) -> int:
        """This rank's number among the tensor-parallel ranks."""
        return int(self.pg.tp.rank())

    @property
    def rows_Y(self) -> list[int]:
        """Number of rows of each tensor-parallel rank, ``[Y]``."""
        return [sum(send_D) for send_D in self.send_YD]

    @property
    def _sent_S(self) -> list[int]:
        return [number for number in self.send_YD[self.rank] for _ in range(self.pg.expt_tp.size())]

    def send(self, rows: Tensor) -> Tensor:
        """Send this rank's rows, by device, to all parts of the devices; returns ``[R, ...]`` by source."""
        num_parts = self.pg.expt_tp.size()
        if num_parts > 1:
            pieces = rows.split(self.send_YD[self.rank])
            rows = torch.cat([piece for piece in pieces for _ in range(num_parts)])
        received: Tensor = all_to_all(self.pg.tp_ep, rows, self.receive_S, self._sent_S)
        return received

    def collect(self, rows: Sequence[Tensor], *, simultaneous: bool) -> list[Tensor]:
        """Results for the rows of all tensor-parallel ranks, summed over the parts of the experts.

        From results of this rank's part of the experts, ``[R, ...]`` each in the order of arrival, to one
        tensor ``[sum(rows_Y), ...]`` each, by tensor-parallel rank, in the order in which it sent the rows.
        ``simultaneous`` passes results on slice by slice (SAA) instead of after all have arrived (AAS).
        """
        if simultaneous and self.pg.ep.size() > 1:
            return self._collect_slices(rows)
        return [gather_rows(self._own_sums(x), self.rows_Y, self.pg.tp) for x in rows]

    def _own_sums(self, rows: Tensor) -> Tensor:
        """Results for this rank's own rows, summed over the parts."""
        partial: Tensor = all_to_all(self.pg.tp_ep, rows, self._sent_S, self.receive_S)
        if self.pg.expt_tp.size() == 1:
            return partial
        pieces, num_parts = partial.split(self._sent_S), self.pg.expt_tp.size()
        devices = range(0, len(pieces), num_parts)
        return torch.cat([torch.stack(pieces[first : first + num_parts]).sum(dim=0) for first in devices])

    def _collect_slices(self, rows: Sequence[Tensor]) -> list[Tensor]:
        pg, num_parts, num_steps = self.pg, self.pg.expt_tp.size(), self.pg.ep.size()
        own, device = self.rank, pg.ep.rank()
        outgoing = [x.contiguous().split(self.receive_S) for x in rows]
        sums = [x.new_empty(sum(self.rows_Y), *x.shape[1:]) for x in rows]
        # Views of the sums by tensor-parallel rank and device, and memory for the parts of this rank's own.
        views = [
            [part.split(send_D) for part, send_D in zip(x.split(self.rows_Y), self.send_YD, strict=True)]
            for x in sums
        ]
        partial = [
            [piece[None] if num_parts == 1 else piece.new_empty(num_parts, *piece.shape) for piece in x[own]]
            for x in views
        ]

        def arrive(step: int) -> list[dist.Work]:
            """Start the second all-to-all's messages of a step."""
            target, source = ((device + turn) % num_steps for turn in (-step, step))
            to = [(target * num_parts + part) for part in range(num_parts)]
            sent = [(rank, x[rank]) for x in outgoing for rank in to]
            received = [(source * num_parts + i, part) for x in partial for i, part in enumerate(x[source])]
            return [*chain(*start_exchange(sent, received, pg.tp_ep, _RESULT_TAG))]

        def hand_on(step: int) -> list[dist.Work]:
            """Add the parts that have arrived in a step, and start the gather's messages."""
            step_Y = [(device + step) % num_steps for device in self.device_Y]
            if num_parts > 1:
                for parts, x in zip(partial, views, strict=True):
                    torch.sum(parts[step_Y[own]], dim=0, out=x[own][step_Y[own]])
            others = [peer for peer in range(len(step_Y)) if peer != own]
            sent = [(peer, x[own][step_Y[own]]) for x in views for peer in others]
            received = [(peer, x[peer][step_Y[peer]]) for x in views for peer in others]
            return [*chain(*start_exchange(sent, received, pg.tp, _GATHER_TAG))]

        # A step is posted before the one before it is awaited, so that the links between nodes stay busy. On
        # CUDA, ``wait`` lets the current stream wait, and each process group has a stream of its own.
        arriving, handed_on = arrive(0), list[dist.Work]()
        for step in range(num_steps):
            following = arrive(step + 1) if step + 1 < num_steps else []
            wait_for(arriving)
            handed_on += hand_on(step)
            arriving = following
        wait_for(handed_on)
        return sums
