"""Pro-Prophet's sub-operators: transfers in two parts under two pieces of compute (Pro-Prophet, §V-B).

The weights of a layer travel while the experts of the layer before compute, and during the compute between
the two layers. The gradients travel at the same places in the backward pass, in the opposite order. The
compute between the layers, such as attention, takes a time that is known before training. So as much as fits
travels there, and the rest travels beside the experts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD

LEAST_SECONDS = 1e-30
"""No transfer takes less. A transfer of nothing takes no seconds, and its share is 0 of this number."""


@dataclass(frozen=True)
class TransferSplit:
    """The part of every expert that travels while the experts of the layer before compute.

    Attributes:
        gather: Share of an expert's weights, from 0 to 1; a number, or an array with one entry for each case.
        reduce: Share of an expert's gradient, from 0 to 1; a number or such an array.

    Raises:
        ValueError: A share is out of range.
    """

    gather: Any = 0.0
    reduce: Any = 0.0

    def __post_init__(self) -> None:
        for name in ("gather", "reduce"):
            share = getattr(self, name)
            is_array = isinstance(share, np.ndarray)
            if not ((share.min() if is_array else share) >= 0 and (share.max() if is_array else share) <= 1):
                raise ValueError(f"{name} is {getattr(self, name)}: wanted a share from 0 to 1")


WHOLE = TransferSplit()
"""A split in which nothing travels beside the experts of the layer before."""


def split_transfers(gather_s: Any, reduce_s: Any, *, non_expert_s: float, expert_s: float) -> TransferSplit:
    """Split transfers by modelled seconds (Pro-Prophet, §V-B, Alg. 2).

    A part that neither piece of compute hides travels with the compute between the layers, which then has to
    wait.

    Args:
        gather_s: Seconds of SparseAllGather; a number, or an array with one entry for each case.
        reduce_s: Seconds of SparseReduceScatter; a number or such an array.
        non_expert_s: Seconds of the forward pass of the compute between two layers (FNEC).
        expert_s: Seconds of the experts' forward pass (FEC).
    """
    return TransferSplit(
        _share_under_experts(gather_s, non_expert_s, expert_s),
        _share_under_experts(reduce_s, BACKWARD_PER_FORWARD * non_expert_s, BACKWARD_PER_FORWARD * expert_s),
    )


def _share_under_experts(busy_s: Any, between_s: float, experts_s: float) -> Any:
    """Share of a transfer that travels beside the experts, from 0 to 1.

    Args:
        busy_s: Seconds of the whole transfer; may be an array.
        between_s: Seconds of the compute between two layers.
        experts_s: Seconds of the experts.
    """
    moved_s = np.minimum(np.maximum(busy_s - between_s, 0.0), experts_s)
    return moved_s / np.maximum(busy_s, LEAST_SECONDS)
