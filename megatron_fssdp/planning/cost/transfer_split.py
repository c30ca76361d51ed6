"""Pro-Prophet's sub-operators: a transfer in two parts, under two pieces of compute (Pro-Prophet, §V-B).

Weights of a layer travel under the experts of the layer before it and under the compute between the
two; gradients under the same in the backward pass, in the other order. What is between, such as
attention, is known before a training starts, so as much as fits goes there and the rest to the experts.
"""

from dataclasses import dataclass

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD


@dataclass(frozen=True)
class TransferSplit:
    """Which part of every expert travels under the experts of the layer before.

    Attributes:
        gather: Share of its weights, from 0 to 1.
        reduce: Share of its gradient, likewise.
    """

    gather: float = 0.0
    reduce: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gather", "reduce"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: wanted a share from 0 to 1")


WHOLE = TransferSplit()
"""Nothing travels under the experts of the layer before."""


def split_transfers(
    gather_s: float, reduce_s: float, *, non_expert_s: float, expert_s: float
) -> TransferSplit:
    """The split by modelled seconds (Pro-Prophet, §V-B, Alg. 2).

    What neither piece of compute hides stays with the compute between the layers, and is waited for.

    Args:
        gather_s: Seconds of SparseAllGather.
        reduce_s: Seconds of SparseReduceScatter.
        non_expert_s: Seconds of the compute between two layers, forward (FNEC).
        expert_s: Seconds of the experts, forward (FEC).
    """
    return TransferSplit(
        _share_under_experts(gather_s, non_expert_s, expert_s),
        _share_under_experts(reduce_s, BACKWARD_PER_FORWARD * non_expert_s, BACKWARD_PER_FORWARD * expert_s),
    )


def _share_under_experts(busy_s: float, between_s: float, experts_s: float) -> float:
    too_much_s = busy_s - between_s
    return 0.0 if too_much_s <= 0 else min(too_much_s, experts_s) / busy_s
