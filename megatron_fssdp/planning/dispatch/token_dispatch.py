"""Which device computes which tokens, for a given placement and given counts.

Shape letters: E experts, D devices.
"""

from typing import Literal, Protocol

import numpy as np

from megatron_fssdp.planning.dispatch.even_dispatch import EvenDispatch
from megatron_fssdp.planning.dispatch.exact_dispatch import exact_dispatch
from megatron_fssdp.planning.dispatch.owner_dispatch import owner_dispatch
from megatron_fssdp.planning.dispatch.sent_rows import SentRows
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

DispatchPolicy = Literal["even", "exact", "owner"]
"""How the tokens of an expert are divided among its holders.

``even``: in equal parts among the nearest holders (Hecate §4.4). ``exact``: by the counts of the micro-batch,
so that device loads become even. ``owner``: all tokens go to the owner, except those of a holder itself.
"""


class TokenDispatch(Protocol):
    """The dispatch of one micro-batch: how many tokens each source sends to each device.

    Every rank derives the same numbers from the same counts. Tokens are (token, k) pairs.
    """

    def rows_from(self, source: int) -> SentRows:
        """Tokens that one source sends."""
        ...

    def device_tokens_D(self) -> np.ndarray:
        """Tokens that every device computes: int64 ``[D]``."""
        ...

    def cross_node_tokens(self) -> int:
        """Number of tokens that are sent to another node."""
        ...


def plan_dispatch(
    policy: DispatchPolicy, counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology
) -> TokenDispatch:
    """Plan the dispatch of exact counts under one of three policies.

    Args:
        policy: ``even`` (:class:`EvenDispatch`), ``exact`` (:func:`exact_dispatch`), or ``owner``
            (:func:`owner_dispatch`). Without replicas all three give the same dispatch.
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        placement: Owners and replicas of the experts.
        topology: Nodes of the devices.
    """
    if policy == "even" or not placement.num_replicas:
        return EvenDispatch(counts_DE, placement, topology)
    if policy == "owner":
        return owner_dispatch(counts_DE, placement, topology)
    return exact_dispatch(counts_DE, placement, topology)
