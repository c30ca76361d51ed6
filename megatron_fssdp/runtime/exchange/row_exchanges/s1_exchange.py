"""Schedule ``s1`` of Parm: each rank sends its rows to all parts of the experts at once."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_fssdp.collectives.rows.sharded_all_to_all import (
    ShardedRoute,
    results_from_parts,
    rows_to_parts,
    start_from_parts,
    start_to_parts,
)
from megatron_fssdp.collectives.rows.two_node_exchange import Start
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.exchange.row_exchanges.megatron_exchange import MegatronExchange
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord


class S1Exchange(MegatronExchange):
    """Schedule ``s1``: each rank sends to all parts of experts, EP&ESP-AlltoAll (Parm §III-C, Fig. 4c, d)."""

    def start(
        self, record: DispatchRecord, placement: ExpertPlacement, on_host: Sequence[np.ndarray] = ()
    ) -> None:
        """Set the dispatch record, and compute the route to all parts of the experts."""
        super().start(record, placement, on_host)
        self._route = ShardedRoute(
            self.groups.parts or self.groups.expert_parallel,
            self.groups.num_parts,
            record.send_D,
            tuple(record.received_SG.sum(axis=1).tolist()),
        )

    def dispatch(
        self, rows: Tensor, probs: Tensor, meanwhile: Callable[[], object] | None
    ) -> tuple[Tensor, Tensor]:
        """Send rows and probabilities to all parts of the experts' devices."""
        rows, probs = rows_to_parts((rows, probs), self._route, meanwhile=meanwhile)
        return rows, probs

    def gather_peers(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and probabilities unchanged: each part of an expert has received all of them."""
        return rows, probs

    def sum_peers(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Results unchanged: the ranks that sent the rows add up the parts' results."""
        return rows

    def combine(self, rows: Tensor) -> Tensor:
        """Send the results back to the tokens' ranks, which add the results of all parts."""
        return results_from_parts(rows, self._route)

    def _directions(self) -> tuple[Start, Start]:
        return partial(start_to_parts, route=self._route), partial(start_from_parts, route=self._route)
