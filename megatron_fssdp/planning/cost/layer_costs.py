"""What transfers, all-to-alls and tokens of a layer cost; the price of every placement is made of it.

A link is inside nodes (0), between nodes (1), or between nodes for one device alone (2).

Shape letters: D devices, E experts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife


class LayerCosts(NamedTuple):
    """The costs of a layer in an iteration, in seconds; ``layer_seconds.py`` says what they contain.

    Attributes:
        dispatch, combine: Start-up and seconds of a pair on each link, ``[3, 2]``; the start-up of one device
            alone is not used.
        moves: Start-up of a transfer, and seconds of an expert and of its gradient, ``[3, 3]``.
        of_hops: By number of hops of a gather, the seconds of a message inside nodes and between nodes, and
            the least seconds of the whole; then the same for a reduction; and both again for a transfer
            that crosses nodes; ``[hops + 1, 12]``.
        per_token_s: Seconds of the experts for a pair in both passes.
        num_micro_batches: Micro-batches of the iteration.
        counts_s: Seconds between gate and dispatch in a micro-batch.
        hidden_s: Compute that hides a gather, and ``hidden_back_s`` a reduction.
        life: How long replicas live.
        in_turn: Whether links inside nodes work after those between nodes in an exchange.
        early: Part of a gather beside the experts of the layer before.
    """

    dispatch: np.ndarray
    combine: np.ndarray
    moves: np.ndarray
    of_hops: np.ndarray
    per_token_s: float
    num_micro_batches: int
    counts_s: float
    hidden_s: float
    hidden_back_s: float
    life: ReplicaLife
    in_turn: bool
    early: float


@dataclass(frozen=True, eq=False)
class CostedLayer:
    """One layer with its owners ``[E]``, its loads, float64 ``[D, E]``, and its costs."""

    owner_E: np.ndarray
    load_DE: np.ndarray
    topology: Topology
    costs: LayerCosts
