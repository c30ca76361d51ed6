"""Schedule ``megatron``, whose steps the other schedules change.

Shape letters: T tokens, A rows that a rank sends, R rows that a rank receives, M model dimension, E experts,
D devices, G experts present on a device, S ranks that send rows, X expert-tensor-parallel peers.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_fssdp.collectives.rows.two_node_exchange import Start, TwoNodeExchange
from megatron_fssdp.collectives.rows.uneven_all_gather import uneven_all_gather, uneven_reduce_scatter
from megatron_fssdp.collectives.rows.uneven_all_to_all import start_exchange, uneven_all_to_all
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.selected_pairs import SelectedPairs
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord


class MegatronExchange:
    """Schedule ``megatron``: all-to-all among the devices, then a gather among the parts of each expert.

    One object serves one forward pass, and the same forward pass if activation recomputation runs it again.
    The backward pass has its own copies in the autograd graph.

    Args:
        groups: Process groups of the layer's expert, expert-tensor and tensor parallelism.
    """

    announces = False
    """Whether ranks tell each other more than their counts (:meth:`numbers_for_all`)."""

    def __init__(self, groups: ExpertGroups) -> None:
        self.groups = groups
        self._record: DispatchRecord | None = None

    @property
    def needed_on_host(self) -> Sequence[Tensor]:
        """Tensors that :meth:`start` needs on the host. They travel together with the counts."""
        return ()

    def numbers_for_all(
        self, selected: SelectedPairs, load_E: Tensor, placement: ExpertPlacement | None
    ) -> Tensor | None:
        """Numbers of this rank that all ranks need, and which travel together with the counts.

        Args:
            selected: Pairs of token and selected expert of this rank.
            load_E: Counts of this rank, ``[E]``.
            placement: Placement of the pass; ``None`` if the dispatch is not even, or if it depends
                on the counts of all ranks.
        """
        return None

    @property
    def record(self) -> DispatchRecord:
        """Ranks to which this rank's rows go and ranks from which it receives rows."""
        if self._record is None:
            raise RuntimeError(
                "the exchange has no dispatch record: got a step before start, wanted gather, then start, "
                "then the other steps"
            )
        return self._record

    @property
    def arrival_SG(self) -> np.ndarray:
        """Number of rows of each present expert, by source, in the order in which rows arrive, ``[S, G]``."""
        return self.record.received_SG

    def gather(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens that this rank brings to the exchange, with their probabilities and selected experts.

        Args:
            hidden: Hidden states of this rank's tokens, ``[T, M]``.
            probs: Routing probabilities, ``[T, E]``.
            routing_map: Experts that each token selected, bool ``[T, E]``.

        Returns:
            Hidden states, routing probabilities and routing map for the tokens to exchange. The schedule
            decides which these are.
        """
        return hidden, probs, routing_map

    def start(
        self, record: DispatchRecord, placement: ExpertPlacement, on_host: Sequence[np.ndarray] = ()
    ) -> None:
        """Set the dispatch record for the steps that follow; it results from the exchanged counts.

        Args:
            record: Ranks to which this rank's rows go and ranks from which it receives rows.
            placement: Owners and replicas of the experts.
            on_host: The tensors of :attr:`needed_on_host`, on the host, and then what the devices returned
                from :meth:`numbers_for_all`, if they did.
        """
        self._record = record

    def permute(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[A, M]`` and probabilities ``[A]`` in the order of sending.

        Args:
            hidden: Hidden states, ``[T, M]``.
            probs: Routing probabilities, ``[T, E]``; entries outside the routing map are ignored.
        """
        return (
            hidden.index_select(0, self.record.token_A),
            probs.reshape(-1).index_select(0, self.record.assignment_A),
        )

    def dispatch(
        self, rows: Tensor, probs: Tensor, meanwhile: Callable[[], object] | None
    ) -> tuple[Tensor, Tensor]:
        """Send rows and probabilities to the experts' devices: ``[R, M]`` and ``[R]``, by source and expert.

        Args:
            rows: Rows in the order of sending, ``[A, M]``.
            probs: Probabilities of these rows, ``[A]``.
            meanwhile: Work for the host to do while the rows travel.
        """
        record, group = self.record, self.groups.expert_parallel
        rows, probs = uneven_all_to_all(
            (rows, probs), record.receive_D, record.send_D, group, meanwhile=meanwhile
        )
        return rows, probs

    def gather_peers(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and probabilities that all parts of the experts have received, ``[R, M]`` and ``[R]``."""
        group, rows_X = self.groups.expert_tensor_parallel, self.record.rows_X
        if group is None:
            return rows, probs
        return uneven_all_gather(rows, rows_X, group), uneven_all_gather(probs, rows_X, group)

    def sum_peers(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums of the parts' results, if the schedule forms them before the results travel back.

        Args:
            rows: Results of this rank's parts of the experts, in the order in which rows came, ``[R, M]``.
            dtype: Data type in which to sum; the result has the data type of ``rows``.
        """
        group = self.groups.expert_tensor_parallel
        if group is None:
            return rows
        return uneven_reduce_scatter(rows.to(dtype), self.record.rows_X, group).to(rows.dtype)

    def combine(self, rows: Tensor) -> Tensor:
        """Send the results back to the tokens' ranks, ``[A, M]``."""
        record, group = self.record, self.groups.expert_parallel
        return uneven_all_to_all((rows,), record.send_D, record.receive_D, group)[0]

    def dispatch_in_two(self) -> TwoNodeExchange | None:
        """:meth:`dispatch` as two autograd nodes, between which other compute runs.

        Returns:
            An exchange of rows ``[A, M]`` and probabilities ``[A]``; ``None`` if the schedule has no such
            form of :meth:`dispatch` and :meth:`combine`.
        """
        to_experts, to_tokens = self._directions()
        return TwoNodeExchange(to_experts, to_tokens)

    def combine_in_two(self) -> TwoNodeExchange | None:
        """:meth:`combine` as two autograd nodes, an exchange of the results ``[R, M]``; or ``None``."""
        to_experts, to_tokens = self._directions()
        return TwoNodeExchange(to_tokens, to_experts)

    def _directions(self) -> tuple[Start, Start]:
        """Functions that start to send tensors to the experts, and back to the tokens' ranks."""
        record, group = self.record, self.groups.expert_parallel
        send_D, receive_D = list(record.send_D), list(record.receive_D)
        return (
            partial(start_exchange, output_splits=receive_D, input_splits=send_D, group=group),
            partial(start_exchange, output_splits=send_D, input_splits=receive_D, group=group),
        )

    def unpermute(self, rows: Tensor) -> Tensor:
        """Sums of each token's results, ``[T, M]`` in the data type of ``rows``."""
        output = rows.new_zeros((self.record.num_tokens, rows.shape[-1]))
        return output.index_add(0, self.record.token_A, rows)
