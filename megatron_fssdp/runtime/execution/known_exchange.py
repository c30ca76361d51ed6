"""From a routing map to the exchange of its rows: the counts travel, the host waits once, the rows can go.

Shape letters: T tokens of this rank, E experts, D devices, N nodes, X expert-tensor-parallel peers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_fssdp.collectives.rows.gathered_counts import start_counts
from megatron_fssdp.planning.dispatch.token_dispatch import TokenDispatch
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.row_exchanges.megatron_exchange import MegatronExchange
from megatron_fssdp.runtime.exchange.selected_pairs import SelectedPairs
from megatron_fssdp.runtime.exchange.token_exchange import plan_exchange
from megatron_fssdp.runtime.exchange.token_spread import token_spread
from megatron_fssdp.strategies.layer_plan import LayerPlan


@dataclass(frozen=True, eq=False)
class KnownExchange:
    """What the host knows about a forward pass of a layer after the exchange of counts.

    Attributes:
        exchange: The exchange of rows; its dispatch record is set.
        plan: Plan of the pass.
        counts_DE: (token, k) pairs by source device and expert, int64 ``[D, E]``.
        dispatch_of_peer: For every expert-tensor-parallel peer, the dispatch of its tokens to devices.
        spread: Result of :func:`token_spread`, summed over all ranks, int64 ``[N + D]``; ``None`` without
            measurement.
    """

    exchange: MegatronExchange
    plan: LayerPlan
    counts_DE: np.ndarray
    dispatch_of_peer: Sequence[TokenDispatch]
    spread: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class ExchangedCounts:
    """Counts of a forward pass that are known to all ranks, and what was prepared while they travelled.

    Attributes:
        counts_XDE: (token, k) pairs by expert-tensor-parallel peer, source device and expert, int64
            ``[X, D, E]``.
        counts_DE: Sums over the peers, int64 ``[D, E]``. Peers compute the same rows, so plans use these
            sums.
        on_host: Tensors that the exchange of rows needs on the host.
        selected: Pairs of token and selected expert of this rank.
        spread: Result of :func:`token_spread`, summed over all ranks, int64 ``[N + D]``; ``None`` without
            measurement.
    """

    counts_XDE: np.ndarray
    counts_DE: np.ndarray
    on_host: Sequence[np.ndarray]
    selected: SelectedPairs
    spread: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        routing_map: torch.Tensor,
        exchange: MegatronExchange,
        plan: LayerPlan,
        most_choices: int | None,
        meanwhile: Callable[[], object],
        measured_E: np.ndarray | None = None,
    ) -> "ExchangedCounts":
        """Exchange the counts. This is the layer's only host synchronization.

        Args:
            routing_map: Experts that each token of this rank selected, bool ``[T, E]``.
            exchange: Exchange of this forward pass.
            plan: Plan of the pass, as far as it is known before the counts.
            most_choices: Largest number of experts that a token selects; ``None`` if it is not known.
            meanwhile: Work of the host while a CUDA device finishes what was queued before. A CPU has
                finished it already, so the function is not called there.
            measured_E: Owners by which :func:`token_spread` is computed, int64 ``[E]``. Its numbers travel
                with the counts. ``None`` leaves them out.
        """
        groups, num_experts = exchange.groups, routing_map.shape[1]
        most_pairs = None if most_choices is None else most_choices * len(routing_map)
        load_E = routing_map.sum(dim=0)
        selected = further = None
        if exchange.announces:
            selected = SelectedPairs.of(routing_map, most_pairs)
            further = exchange.numbers_for_all(selected, load_E, plan.evenly_split)
        numbers = [load_E]
        if measured_E is not None:
            numbers.append(token_spread(routing_map, measured_E, groups.topology))
        first = sum(map(len, numbers))
        if further is not None:
            numbers.append(further)
        counts = start_counts(
            torch.cat(numbers) if len(numbers) > 1 else load_E,
            groups.expert_parallel,
            groups.expert_tensor_parallel,
            exchange.needed_on_host,
        )
        selected = selected or SelectedPairs.of(routing_map, most_pairs)
        if routing_map.device.type == "cuda":
            meanwhile()
        numbers_XD, *on_host = (copy.numpy() for copy in counts.wait())
        if further is not None:
            on_host.append(numbers_XD[groups.peer, :, first:])
        counts_XDE = np.ascontiguousarray(numbers_XD[:, :, :num_experts])
        spread = None if measured_E is None else numbers_XD[:, :, num_experts:first].sum(axis=(0, 1))
        return cls(counts_XDE, counts_XDE.sum(axis=0), on_host, selected, spread)

    def start(self, exchange: MegatronExchange, plan: LayerPlan, topology: Topology) -> KnownExchange:
        """Compute where the rows go, and set the exchange's dispatch record.

        Args:
            exchange: Exchange of this forward pass.
            plan: Plan of the pass.
            topology: Nodes of the devices.
        """
        groups = exchange.groups
        dispatch_of_peer = plan.dispatch(self.counts_XDE, topology)
        record = plan_exchange(self.selected, dispatch_of_peer, plan.placement, groups.device, groups.peer)
        exchange.start(record, plan.placement, self.on_host)
        return KnownExchange(exchange, plan, self.counts_DE, dispatch_of_peer, self.spread)
