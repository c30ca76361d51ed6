"""The deduplicated exchange: a token's hidden state crosses each link once, not once for each of its experts.

A row of this exchange is a token, not a pair of a token and an expert. It travels with the token's *choices*:
for each of its experts the device that computes it, the expert's number, and the probability. Two hops carry
it (``planning/dispatch/two_hops.py`` has a drawing): to one relay in each node that computes one of its
experts, and from there to each device of the node that does. The device makes one row for each of its
experts. Results are summed in fp32 on the device, then on the relay, then at the source.

With one node the first hop is left out, and with one device in each node the second.

Shape letters: T tokens of this rank, K choices of a token, U rows of a hop, R rows that the experts of this
device compute, M model dimension, E experts, D devices, N nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.rows.gathered_counts import gather_counts
from megatron_fssdp.collectives.rows.spread_rows import spread_rows, sum_places
from megatron_fssdp.collectives.rows.uneven_all_to_all import uneven_all_to_all
from megatron_fssdp.planning.dispatch.two_hops import TwoHops
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.row_exchanges import MegatronExchange
from megatron_fssdp.runtime.exchange.selected_pairs import true_positions
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord

NO_CHOICE = -1


class DeduplicatedExchange(MegatronExchange):
    """Sends each token once to each node, and there once to each device that computes one of its experts.

    Args:
        groups: Process groups of the layer's expert, expert-tensor and tensor parallelism.
        most_choices: Largest number of experts that a token selects, K; ``None`` if it is not known. Every
            row then carries one choice for each expert of the layer.
    """

    def __init__(self, groups: ExpertGroups, most_choices: int | None = None) -> None:
        super().__init__(groups)
        self._most_choices = most_choices

    def start(
        self, record: DispatchRecord, placement: ExpertPlacement, on_host: Sequence[np.ndarray] = ()
    ) -> None:
        """Set the dispatch record, and exchange how many tokens go to each node and device.

        Only the source knows how many *different* tokens it sends to a device, so these numbers are gathered
        in a second, small collective.
        """
        super().start(record, placement, on_host)
        topology, group = self.groups.topology, self.groups.expert_parallel
        self._choices = Choices.of(record, placement, self._most_choices)
        hits = [self._choices.hits(range_of) for range_of in (topology.node_of_device, range(group.size()))]
        counts = torch.cat([hit.sum(dim=0) for hit in hits])
        gathered = gather_counts(counts, group).cpu().numpy()
        self._hops = TwoHops(topology, gathered[:, : topology.num_nodes], gathered[:, topology.num_nodes :])
        self._experts_here = placement.experts_on_G(self.groups.device)

    def permute(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states ``[T, M]``, and the probabilities of each token's choices, ``[T, K]``."""
        return hidden, self._choices.probabilities(probs)

    def dispatch(
        self, rows: Tensor, probs: Tensor, meanwhile: Callable[[], object] | None
    ) -> tuple[Tensor, Tensor]:
        """Send the tokens in two hops, and make one row for each expert: ``[R, M]`` and ``[R]``.

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
            hit = tokens.choices.hits(topology.node_of_device)[:, torch.from_numpy(order_N).to(rows.device)]
            tokens, meanwhile = self._hop(tokens, hit, self._hops.first_hop(device), group, meanwhile), None
        if topology.num_devices > topology.num_nodes:
            members = torch.tensor(self._hops.members(device), device=rows.device)
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
            tokens: Tokens on this rank, ``[U, ...]``.
            hit: Whether a token goes to a destination, bool ``[U, destinations]``. Destinations are in the
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
                spread_rows(tokens.rows, hop.row_A),
                tokens.probs.index_select(0, hop.row_A),
                tokens.choices.codes.index_select(0, hop.row_A),
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
            rows = sum_places(rows, index, num_rows)
            rows = uneven_all_to_all((rows,), hop.sends_D, hop.receives_D, self.groups.expert_parallel)[0]
            index, num_rows = hop.row_A, hop.num_rows
        self._back = index
        return rows

    def dispatch_in_two(self) -> None:
        """There is no such form: the second hop starts when the rows of the first one have arrived."""

    def combine_in_two(self) -> None:
        """There is no such form, see :meth:`dispatch_in_two`."""

    def unpermute(self, rows: Tensor) -> Tensor:
        """Sums of each token's results, ``[T, M]`` in the data type of ``rows``."""
        return sum_places(rows, self._back, self.record.num_tokens)


@dataclass(frozen=True, eq=False)
class Choices:
    """The experts that tokens selected, and the devices that compute them.

    Attributes:
        codes: For each choice of each row ``device * E + expert``, or ``NO_CHOICE``; int32 ``[U, K]``.
        num_experts: Number of experts of the layer, E.
    """

    codes: Tensor
    num_experts: int

    @classmethod
    def of(cls, record: DispatchRecord, placement: ExpertPlacement, most_choices: int | None) -> "Choices":
        """The choices of this rank's tokens.

        Args:
            record: Ranks to which the rows of this rank go.
            placement: Owners and replicas of the experts.
            most_choices: Largest number of experts that a token selects; ``None`` if it is not known.
        """
        num_experts, assignment = placement.num_experts, record.assignment_A
        sends_D = torch.tensor(record.send_D, device=assignment.device)
        device_A = torch.repeat_interleave(sends_D, output_size=len(assignment))
        table = assignment.new_full((record.num_tokens * num_experts,), NO_CHOICE, dtype=torch.int32)
        codes = (device_A * num_experts + assignment % num_experts).int()
        table = table.index_copy_(0, assignment, codes).view(record.num_tokens, num_experts)
        if most_choices is None or most_choices >= num_experts:
            return cls(table, num_experts)
        is_chosen = table != NO_CHOICE
        # Entries that are not chosen write to one extra column, which is then cut off.
        slot = torch.where(is_chosen, is_chosen.cumsum(dim=1) - 1, most_choices)
        narrow = table.new_full((len(table), most_choices + 1), NO_CHOICE)
        return cls(narrow.scatter_(1, slot, table)[:, :most_choices].contiguous(), num_experts)

    @property
    def device(self) -> Tensor:
        """Device that computes each choice, int64 ``[U, K]``; negative where there is no choice."""
        return torch.div(self.codes, self.num_experts, rounding_mode="floor").long()

    def hits(self, number_of_device: Sequence[int]) -> Tensor:
        """Whether a row has a choice on each node or device, bool ``[U, numbers]``.

        Args:
            number_of_device: Number of the node or of the device for each device, ``[D]``.
        """
        codes, numbers = self.codes, max(number_of_device) + 1
        # The last entry of the table stands for "no choice", whose device is -1.
        table = torch.tensor([*number_of_device, numbers], device=codes.device)
        hit = torch.zeros(len(codes), numbers + 1, dtype=torch.bool, device=codes.device)
        return hit.scatter_(1, table[self.device], True)[:, :numbers]

    def probabilities(self, probs: Tensor) -> Tensor:
        """Probability of each choice, ``[U, K]``; 0 where there is no choice.

        Args:
            probs: Routing probabilities, ``[U, E]``.
        """
        is_chosen = self.codes != NO_CHOICE
        expert = torch.where(is_chosen, self.codes % self.num_experts, 0).long()
        return torch.where(is_chosen, probs.gather(1, expert), 0)

    def pairs_here(
        self, device: int, expert_G: np.ndarray, source_S: np.ndarray, rows_S: np.ndarray, num_pairs: int
    ) -> Tensor:
        """Choices that a device computes, by source, expert and token, as positions in ``[U * K]``.

        Args:
            device: The device.
            expert_G: Experts on the device, ascending, integers ``[G]``.
            source_S: Sources of the rows in the order of arrival, integers ``[S]``.
            rows_S: Number of rows of each of these sources, ``[S]``.
            num_pairs: Number of choices that the device computes, R.

        Returns:
            Positions, int64 ``[R]``.
        """
        codes, num_present = self.codes, len(expert_G)
        place_E = np.zeros(self.num_experts, np.int64)
        place_E[expert_G] = np.arange(num_present)
        place = torch.from_numpy(place_E).to(codes.device)[(codes % self.num_experts).long()]
        sizes = torch.from_numpy(rows_S).to(codes.device)
        sources = torch.from_numpy(source_S).to(codes.device)
        source = sources.repeat_interleave(sizes, output_size=len(codes))
        key = torch.where(
            self.device == device,
            source.unsqueeze(1) * num_present + place,
            len(source_S) * (num_present + 1),
        )
        return torch.sort(key.reshape(-1), stable=True).indices[:num_pairs]


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Tokens on a rank between the hops: hidden states ``[U, M]``, probabilities ``[U, K]`` and choices."""

    rows: Tensor
    probs: Tensor
    choices: Choices


@dataclass(frozen=True, eq=False)
class _Hop:
    """Where the rows of one hop come from, and how many travel between the ranks.

    Attributes:
        row_A: Row of the tokens before the hop, for each row that is sent; int64 ``[A]``.
        num_rows: Number of tokens before the hop.
        sends_D: Number of rows to send to each rank.
        receives_D: Number of rows to receive from each rank.
    """

    row_A: Tensor
    num_rows: int
    sends_D: list[int]
    receives_D: list[int]
