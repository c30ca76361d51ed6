"""Who computes which tokens when the placement is fixed and the counts are known.

Shape letters: E experts, D devices.
"""

from typing import Literal, Protocol

import numpy as np

from megatron_fssdp.planning.dispatch.balanced_dispatch import balanced_dispatch
from megatron_fssdp.planning.dispatch.even_dispatch import EvenDispatch
from megatron_fssdp.planning.dispatch.owner_dispatch import owner_dispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

DispatchPolicy = Literal["even", "balanced", "owner"]


class TokenDispatch(Protocol):
    """One micro-batch's tokens on their way; every rank derives the same numbers."""

    def from_source(self, source: int) -> np.ndarray:
        """What one source sends: int64 [E, D], by expert and device."""
        ...

    def to_device(self, device: int) -> np.ndarray:
        """What one device receives: int64 [D, E], by source and expert."""
        ...

    def device_tokens_D(self) -> np.ndarray:
        """(token, k) pairs every device computes: int64 [D]."""
        ...

    def cross_node_tokens(self) -> int:
        """Pairs sent to another node."""
        ...


def plan_dispatch(
    policy: DispatchPolicy, counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology
) -> TokenDispatch:
    """Dispatch the exact counts.

    Args:
        policy: ``even`` as in Hecate §4.4, ``balanced`` (:func:`balanced_dispatch`), or ``owner``
            (:func:`owner_dispatch`).
        counts_DE: (token, k) pairs by source and expert, integers [D, E].
        placement: Where the experts are.
        topology: Nodes of the devices.
    """
    if policy == "even" or not placement.num_replicas:
        return EvenDispatch(counts_DE, placement, topology)
    if policy == "owner":
        return owner_dispatch(counts_DE, placement, topology)
    return balanced_dispatch(counts_DE, placement, topology)
