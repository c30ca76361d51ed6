"""Counts the tokens of one layer by slot on the device, and turns all ranks' counts into loads on the host.

Shape letters: T tokens of this rank, D devices, E experts, N nodes, S ranks that send rows, W slots of all
devices.
"""

import numpy as np
import torch

from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.slot_pass import SlotPass


class SlotCounts:
    """The counts of one layer in an iteration.

    ``plain_owner_E``, int64 ``[E]``, are the owners under plain expert parallelism. With ``measures_spread``,
    it also counts on how many nodes and devices the experts of a token are.
    """

    def __init__(self, topology: Topology, plain_owner_E: np.ndarray, measures_spread: bool) -> None:
        self._topology, self._plain_owner_E = topology, plain_owner_E
        self._measures_spread = measures_spread
        self._counts_W: torch.Tensor | None = None
        self._num_slots, self._is_clear = -1, True
        self._spread: TokenSpread | None = None
        self.num_counting = 1  # Ranks that count each token: several if tensor-parallel ranks all route it.

    def open(self, one: SlotPass, device: torch.device) -> torch.Tensor | None:
        """The sums of the iteration by slot, int64 ``[W]``, to which its passes add; others have none.

        They keep their addresses while the number of slots stays. Before a CUDA graph that counts is
        captured, this must have been called once outside of a graph.
        """
        self._is_clear = False
        if self._measures_spread and self._spread is None:
            self._spread = TokenSpread(self._plain_owner_E, self._topology, device)
        if one.is_shared and (self._counts_W is None or self._num_slots != one.num_slots):
            self._num_slots = one.num_slots
            self._counts_W = torch.zeros(one.num_slots, dtype=torch.int64, device=device)
        return self._counts_W if one.is_shared else None

    def add_spread(self, routing_map: torch.Tensor) -> None:
        """Count on how many places the experts of tokens, bool ``[T, E]``, are; the host does not wait."""
        if self._spread is not None:
            self._spread.add(routing_map)

    def clear(self) -> None:
        """Drop the counts."""
        if not self._is_clear:
            sums = (self._counts_W, None if self._spread is None else self._spread.sums)
            for one in sums:
                if one is not None:
                    one.zero_()
        self._is_clear = True

    def to_share(self, shared: SlotPass | None) -> torch.Tensor | None:
        """What other ranks need of this rank: tokens by slot, then their spread; int64, of equal length.

        ``None`` if there is nothing, or if the counts are on the host already. ``shared`` is the pass of the
        iteration, ``None`` if the layer was not used.
        """
        on_device = shared is not None and not shared.plan.each_micro_batch
        spread = None if self._spread is None else self._spread.sums
        numbers = [one for one in (self._counts_W if on_device else None, spread) if one is not None]
        return torch.cat(numbers) if numbers else None

    def take(self, numbers_SN: np.ndarray, shared: SlotPass | None, load: LayerLoad, measure: bool) -> None:
        """Add the numbers of all ranks, int64, to the load of the iteration.

        Part x of device d is row d X + x. ``measure`` also adds device loads and what plain expert
        parallelism would have done.
        """
        num_devices = self._topology.num_devices
        numbers_DN = numbers_SN.reshape(num_devices, -1, numbers_SN.shape[1]).sum(axis=1)
        num_slots = numbers_DN.shape[1] - (0 if self._spread is None else len(self._spread.sums))
        counts_DW = numbers_DN[:, :num_slots] // self.num_counting
        counts_DE = np.zeros_like(load.counts_DE)
        if num_slots:
            assert shared is not None
            expert_W = shared.slots.expert_DU.reshape(-1)
            used_W = expert_W >= 0
            np.add.at(counts_DE.T, expert_W[used_W], counts_DW[:, used_W].T)
            load.counts_DE += counts_DE
            if measure:
                counts_DD = counts_DW.reshape(num_devices, num_devices, -1).sum(axis=2)
                node_D = self._topology.node_of_device_D
                crossing = int(counts_DD[node_D[:, None] != node_D].sum())
                load.add_tokens(shared.plan.placement, counts_DD.sum(axis=0), crossing)
        if measure:
            spread_DN = numbers_DN[:, num_slots:]
            spread = spread_DN.sum(axis=0) // self.num_counting if spread_DN.size else None
            load.add_plain(counts_DE, self._plain_owner_E, spread)

    def count_on_host(self, counts_DE: np.ndarray, own: SlotPass, load: LayerLoad, measure: bool) -> None:
        """Add a micro-batch whose counts the host knows, int64 ``[D, E]``."""
        load.counts_DE += counts_DE
        if measure:
            dispatch = own.plan.dispatch(counts_DE, self._topology)
            crossing = round(dispatch.cross_node_tokens)
            load.add_tokens(own.plan.placement, dispatch.whole_tokens_D, crossing)
            load.add_plain(counts_DE, self._plain_owner_E, None)


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
