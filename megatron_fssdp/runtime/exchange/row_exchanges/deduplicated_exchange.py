"""The deduplicated exchange: a token's hidden state crosses each link once, not once for each of its experts.

A row of this exchange is a token, not a pair of a token and an expert. It travels with the token's *choices*:
for each of its experts the device that computes it, the expert's number, and the probability. Two hops carry
it (``planning/dispatch/two_hops.py`` has a drawing): to one relay in each node that computes one of its
experts, and from there to each device of the node that does. The device makes one row for each of its
experts. Results are summed in fp32 on the device, then on the relay, then at the source.

With one node the first hop is left out, and with one device in each node the second.

Shape letters: T tokens that a rank has before a hop, K choices per token, A rows that a rank sends in a hop,
R rows that a rank receives (for its experts), M model dimension, E experts, D devices, N nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.rows.gathered_counts import gather_counts
from megatron_fssdp.collectives.rows.spread_rows import spread_rows, sum_rows
from megatron_fssdp.collectives.rows.uneven_all_to_all import uneven_all_to_all
from megatron_fssdp.planning.dispatch.two_hops import TwoHops
from megatron_fssdp.planning.placement.holder_groups import holder_groups
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.row_exchanges.megatron_exchange import MegatronExchange
from megatron_fssdp.runtime.exchange.selected_pairs import SelectedPairs, true_positions
from megatron_fssdp.runtime.exchange.token_choices import Choices, on_device
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord


class DeduplicatedExchange(MegatronExchange):
    """Sends each token once to each node, and there once to each device that computes one of its experts.

    Args:
        groups: Process groups of the layer's expert, expert-tensor and tensor parallelism.
        most_choices: Largest number of experts that a token selects, K; ``None`` if it is not known. Every
            row then carries one choice for each expert of the layer.
    """

    announces = True

    def __init__(self, groups: ExpertGroups, most_choices: int | None = None) -> None:
        super().__init__(groups)
        self._most_choices = most_choices
        self._announced: ExpertPlacement | None = None

    def numbers_for_all(
        self, selected: SelectedPairs, load_E: Tensor, placement: ExpertPlacement | None
    ) -> Tensor | None:
        """The numbers of different tokens that this rank will send to each node and device, ``[N + D]``.

        Under even dispatch a source's split follows from its own counts, so the device can compute these
        numbers before the counts of all ranks are known. They then travel together with the counts.

        Args:
            selected: Pairs of token and selected expert of this rank.
            load_E: Counts of this rank, ``[E]``.
            placement: Placement of the pass; ``None`` if the dispatch is not even, or if it depends
                on the counts of all ranks.
        """
        self._announced = placement
        if placement is None:
            return None
        topology = self.groups.topology
        row = holder_groups(placement, topology).row(self.groups.device)
        self._choices = Choices.before_counts(selected, load_E, row, topology, self._most_choices)
        return self._distinct_tokens()

    def start(
        self, record: DispatchRecord, placement: ExpertPlacement, on_host: Sequence[np.ndarray] = ()
    ) -> None:
        """Set the dispatch record, and learn how many tokens every rank sends to each node and device.

        Where :meth:`numbers_for_all` could not say it, a second, small collective gathers these numbers.

        Args:
            record: Ranks to which this rank's rows go and ranks from which it receives rows.
            placement: Owners and replicas of the experts.
            on_host: What all ranks returned from :meth:`numbers_for_all`, ``[D, N + D]``; nothing if it was
                ``None``.
        """
        super().start(record, placement)
        topology = self.groups.topology
        if on_host and placement is self._announced:
            (numbers,) = on_host
        else:
            self._choices = Choices.of(record, placement, topology, self._most_choices)
            numbers = gather_counts(self._distinct_tokens(), self.groups.expert_parallel).cpu().numpy()
        self._announced = None
        self._hops = TwoHops(topology, numbers[:, : topology.num_nodes], numbers[:, topology.num_nodes :])
        self._experts_here = placement.experts_on_G(self.groups.device)

    @property
    def arrival_SG(self) -> np.ndarray:
        """Rows of each present expert: a peer's rows are in the order of experts, as from one source."""
        received_SG = self.record.received_SG
        return received_SG.reshape(-1, self.groups.num_devices, received_SG.shape[1]).sum(axis=1)

    def _distinct_tokens(self) -> Tensor:
        numbers_of = self.groups.topology.node_of_device, range(self.groups.num_devices)
        return torch.cat([self._choices.hits(numbers).sum(dim=0) for numbers in numbers_of])

    def permute(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states ``[T, M]``, and the probabilities of each token's choices, ``[T, K]``."""
        return hidden, self._choices.probabilities(probs)

    def dispatch(
        self, rows: Tensor, probs: Tensor, meanwhile: Callable[[], object] | None
    ) -> tuple[Tensor, Tensor]:
        """Send the tokens in two hops, and make one row for each expert: ``[R, M]`` and ``[R]``, by expert.

        Args:
            rows: Hidden states, ``[T, M]``.
            probs: Probabilities of each token's choices, ``[T, K]``.
            meanwhile: Work for the host to do while the first rows travel.
        """
        device, topology, group = self.groups.device, self.groups.topology, self.groups.expert_parallel
        tokens = _Tokens(rows, probs, self._choices)
        self._route: list[_Hop] = []
        if topology.num_nodes > 1:
            order_N = self._hops.nodes_to_send(device)
            hit = tokens.choices.hits(topology.node_of_device)[:, on_device(order_N, rows.device)]
            tokens, meanwhile = self._hop(tokens, hit, self._hops.first_hop(device), group, meanwhile), None
        if topology.num_devices > topology.num_nodes:
            members = on_device(self._hops.members(device), rows.device)
            hit = tokens.choices.hits(range(group.size()))[:, members]
            tokens, meanwhile = self._hop(tokens, hit, self._hops.second_hop(device), group, meanwhile), None
        if meanwhile is not None:
            meanwhile()
        pair_R = tokens.choices.pairs_here(
            device, self._experts_here, *self._hops.arrivals(device), sum(self.record.receive_D)
        )
        self._pairs = pair_R // tokens.probs.shape[1], len(tokens.rows)
        return spread_rows(tokens.rows, self._pairs[0]), tokens.probs.reshape(-1).index_select(0, pair_R)

    def _hop(
        self,
        tokens: "_Tokens",
        hit: Tensor,
        splits: tuple[np.ndarray, np.ndarray],
        group: dist.ProcessGroup,
        meanwhile: Callable[[], object] | None,
    ) -> "_Tokens":
        """Send every token to all destinations that it hits.

        Args:
            tokens: Tokens on this rank, ``[T, ...]``.
            hit: Whether a token goes to a destination, bool ``[T, destinations]``. Destinations are in the
                order of their ranks.
            splits: Number of rows to send to and to receive from every rank.
            group: Process group of the ranks.
            meanwhile: Work for the host to do while the rows travel.
        """
        sends_D, receives_D = (numbers.tolist() for numbers in splits)
        position = true_positions(hit.t().reshape(-1), sum(sends_D))
        hop = _Hop(position % max(len(hit), 1), len(hit), sends_D, receives_D)
        self._route.append(hop)
        rows, probs, codes = uneven_all_to_all(
            (
                spread_rows(tokens.rows, hop.token_A),
                tokens.probs.index_select(0, hop.token_A),
                tokens.choices.codes.index_select(0, hop.token_A),
            ),
            receives_D,
            sends_D,
            group,
            meanwhile=meanwhile,
        )
        return _Tokens(rows, probs, Choices(codes, tokens.choices.num_experts))

    def combine(self, rows: Tensor) -> Tensor:
        """Sum the results of each token on this device, and send the sums back through both hops.

        Args:
            rows: Results of this device's experts, ``[R, M]``.

        Returns:
            One row for each token and node to which the token went; :meth:`unpermute` sums them.
        """
        index, num_rows = self._pairs
        for hop in reversed(self._route):
            rows = sum_rows(rows, index, num_rows)
            rows = uneven_all_to_all((rows,), hop.sends_D, hop.receives_D, self.groups.expert_parallel)[0]
            index, num_rows = hop.token_A, hop.num_rows
        self._back = index
        return rows

    def dispatch_in_two(self) -> None:
        """There is no such form: the second hop starts when the rows of the first one have arrived."""

    def combine_in_two(self) -> None:
        """There is no such form, see :meth:`dispatch_in_two`."""

    def unpermute(self, rows: Tensor) -> Tensor:
        """Sums of each token's results, ``[T, M]`` in the data type of ``rows``."""
        return sum_rows(rows, self._back, self.record.num_tokens)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Tokens on a rank between the hops: hidden states ``[T, M]``, probabilities ``[T, K]`` and choices."""

    rows: Tensor
    probs: Tensor
    choices: Choices


@dataclass(frozen=True, eq=False)
class _Hop:
    """Where the rows of one hop come from, and how many travel between the ranks.

    Attributes:
        token_A: Token of each row that is sent, int64 ``[A]``.
        num_rows: Number of tokens before the hop.
        sends_D: Number of rows to send to each rank.
        receives_D: Number of rows to receive from each rank.
    """

    token_A: Tensor
    num_rows: int
    sends_D: list[int]
    receives_D: list[int]
