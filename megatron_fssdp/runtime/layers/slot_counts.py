"""Counts the tokens of one layer by slot on the device, and turns all ranks' counts into loads on the host.

Shape letters: T tokens of this rank, D devices, E experts, N nodes or numbers, S ranks that send rows,
I passes of an iteration, X expert-tensor-parallel peers, W slots of all devices.
"""

from functools import partial

import numpy as np
import torch

from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.layers.local_layer import LocalLayer
from megatron_fssdp.runtime.layers.pass_binder import SlotPass

MOST_ROWS = 32
"""Passes of an iteration that have rows of their own. Further ones are added to these, in turn.

A rank sends 4 bytes for each slot, layer and row, and for a sum of the rows. For 58 layers with 256 slots,
these are 1.0 MB in 16 micro-batches and 2.0 MB in 32 or more; from 64 ranks, each gets 65 or 125 MB. As
int64, they would be twice as much, and no rank has 2^31 tokens in an iteration.
"""


class SlotCounts:
    """The counts of one layer in an iteration, which end in ``local.load``.

    With ``measures_spread``, equal on all ranks, it also counts on how many nodes and devices the experts of
    a token are under the owners with which the layer was built, which are those of plain expert parallelism.
    """

    def __init__(self, local: LocalLayer, *, measures_spread: bool) -> None:
        self._local, self._topology = local, local.context.topology
        self._plain_owner_E, self._measures_spread = local.context.owner_E, measures_spread
        self._rows_W: list[torch.Tensor] = []  # zeros beyond the passes of the iteration
        self._num_slots, self._num_passes, self._most_rows = -1, 0, MOST_ROWS
        self.is_clear = True  # No pass is counted.
        self._spread: TokenSpread | None = None
        self.num_counting = 1  # Ranks that count each token: several if tensor-parallel ranks all route it.

    def open(self, slot_pass: SlotPass, routing_map: torch.Tensor | None) -> torch.Tensor | None:
        """The row of a new pass, int32 ``[W]``, to which it adds its tokens by slot, if it remaps them.

        ``None`` if the host knows its counts. The map of experts, bool ``[T, E]``, is ``None`` if a CUDA
        graph counts, or will: all passes of the iteration then have one row, whose address stays while the
        number of slots stays. Before such a graph is captured, this must have been called once outside of it.
        """
        self.is_clear = False
        device = self._local.experts.device if routing_map is None else routing_map.device
        if slot_pass.counts_DE is not None:
            self._count_on_host(slot_pass.counts_DE, slot_pass)
        if self._measures_spread and self._spread is None:
            self._spread = TokenSpread(self._plain_owner_E, self._topology, device)
        if routing_map is None:
            self._most_rows = 1
        row_W = self._row(slot_pass.num_slots, device) if slot_pass.is_shared else None
        if self._spread is not None and routing_map is not None:
            self._spread.add(routing_map)
        if row_W is not None and routing_map is not None and slot_pass.shares is None:
            row_W.add_(routing_map.sum(0))
        return row_W

    def _row(self, num_slots: int, device: torch.device) -> torch.Tensor:
        if self._num_slots != num_slots:
            self._num_slots, self._num_passes, self._rows_W = num_slots, 0, []
        number = self._num_passes % self._most_rows
        if number == len(self._rows_W):
            self._rows_W.append(torch.zeros(num_slots, dtype=torch.int32, device=device))
        self._num_passes += 1
        return self._rows_W[number]

    def clear(self) -> None:
        """Drop the counts."""
        numbers = self._rows_W + ([] if self._spread is None else [self._spread.sums])
        if numbers and not self.is_clear:
            torch._foreach_zero_(numbers)
        self._num_passes, self.is_clear = 0, True

    def to_share(self, shared: SlotPass | None) -> torch.Tensor | None:
        """What other ranks need of this rank: tokens by slot, of single passes, and their spread; int32.

        ``None`` if there is nothing, or if the counts are on the host already. ``shared`` is the pass of the
        iteration, ``None`` if the layer was not used. Single passes are left out where there is one, and
        where a CUDA graph has added them up.
        """
        numbers = []
        if self._num_passes and shared is not None and not shared.plan.each_micro_batch:
            rows = self._rows_W[: min(self._num_passes, self._most_rows)]
            if len(rows) > 1:
                # The device adds up: for many layers on many ranks, this would take the host long.
                numbers.append(torch.stack(rows).sum(dim=0, dtype=torch.int32))
            numbers += rows
        if self._spread is not None:
            numbers.append(self._spread.sums.int())
        return torch.cat(numbers) if len(numbers) > 1 else next(iter(numbers), None)

    def take(self, numbers_SN: np.ndarray, shared: SlotPass | None) -> None:
        """Add the numbers of all ranks, as many as :meth:`to_share` has, to the load of the iteration.

        Part x of device d is row d X + x. A layer with a journal also gets device loads and what plain expert
        parallelism would have done.
        """
        load, num_devices = self._local.load, self._topology.num_devices
        measure = self._local.journal is not None
        numbers_DXN = numbers_SN.reshape(num_devices, -1, numbers_SN.shape[1])
        end = numbers_SN.shape[1] - (0 if self._spread is None else len(self._spread.sums))
        counts_DE = np.zeros_like(load.counts_DE)
        if end:
            assert shared is not None
            expert_W = shared.slots.expert_DU.reshape(-1)
            of_experts = partial(_by_expert, expert_W, counts_DE.shape[1], self.num_counting)
            rows_DXIW = numbers_DXN[..., :end].reshape(*numbers_DXN.shape[:2], -1, shared.num_slots)
            rows_IDXW = rows_DXIW.transpose(2, 0, 1, 3)
            sums_DXW = rows_IDXW[0]  # The sum of several rows comes before them.
            counts_DE = of_experts(1, sums_DXW)
            rows_IDXW = rows_IDXW[len(rows_IDXW) > 1 :]
            # A row of several passes stands for each of them by their mean, but a single row for all of them.
            num_passes, num_rows = self._num_passes if len(rows_IDXW) > 1 else 1, len(rows_IDXW)
            for number in range(num_passes):
                num_added = len(range(number % num_rows, num_passes, num_rows))
                load.micro_batches.append(partial(of_experts, num_added, rows_IDXW[number % num_rows]))
            load.are_sums = self._num_passes > self._most_rows
            load.counts_DE += counts_DE
            if measure:
                counts_DW = sums_DXW.sum(axis=1, dtype=np.int64) // self.num_counting
                counts_DD = counts_DW.reshape(num_devices, num_devices, -1).sum(axis=2)
                node_D = self._topology.node_of_device_D
                crossing = int(counts_DD[node_D[:, None] != node_D].sum())
                load.add_tokens(shared.plan.placement, counts_DD.sum(axis=0), crossing)
        if measure:
            spread_N = numbers_DXN[..., end:].sum(axis=(0, 1), dtype=np.int64) // self.num_counting
            load.add_plain(counts_DE, self._plain_owner_E, spread_N if len(spread_N) else None)

    def _count_on_host(self, counts_DE: np.ndarray, own: SlotPass) -> None:
        load = self._local.load
        load.counts_DE += counts_DE
        load.micro_batches.append(lambda: counts_DE)
        if self._local.journal is not None:
            dispatch = own.plan.dispatch(counts_DE, self._topology)
            crossing = round(dispatch.cross_node_tokens)
            load.add_tokens(own.plan.placement, dispatch.whole_tokens_D, crossing)
            load.add_plain(counts_DE, self._plain_owner_E, None)


def _by_expert(
    expert_W: np.ndarray, num_experts: int, num_counting: int, num_passes: int, counts_DXW: np.ndarray
) -> np.ndarray:
    """Tokens of every device for every expert, int64 ``[D, E]``, from those for slots in so many passes.

    Empty slots have the expert -1.
    """
    used_W = expert_W >= 0
    counts_DE = np.zeros((len(counts_DXW), num_experts), np.int64)
    counts_DW = counts_DXW.sum(axis=1, dtype=np.int64) // num_counting
    np.add.at(counts_DE.T, expert_W[used_W], counts_DW[:, used_W].T)
    return counts_DE // num_passes


class TokenSpread:
    """Counts on how many places the owners of a token's experts are.

    ``sums``, int64 ``[N + D]``: tokens whose experts are on 1, 2, … N nodes, then on 1, 2, … D devices.
    """

    def __init__(self, owner_E: np.ndarray, topology: Topology, device: torch.device) -> None:
        self.sums = torch.zeros(topology.num_nodes + topology.num_devices, dtype=torch.int64, device=device)
        node_E = topology.node_of_device_D[owner_E]
        # The host's copies are needed here only, so a wait for them does not matter.
        self._places = [
            (torch.from_numpy(place_E[:, None] == np.arange(num)).to(device).float(), counts)
            for place_E, num, counts in (
                (node_E, topology.num_nodes, self.sums[: topology.num_nodes]),
                (owner_E, topology.num_devices, self.sums[topology.num_nodes :]),
            )
        ]

    def add(self, routing_map: torch.Tensor) -> None:
        """Add the tokens of a routing map, bool ``[T, E]``."""
        selected = routing_map.float()
        for place_EN, sums in self._places:
            num_hit_T = (selected @ place_EN > 0).sum(dim=1, keepdim=True)
            numbers = torch.arange(1, len(sums) + 1, device=sums.device)
            sums.add_((num_hit_T == numbers).sum(dim=0))
