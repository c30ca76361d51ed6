"""Pro-Prophet's sub-operators: transfers in two parts under two pieces of compute (Pro-Prophet, §V-B).

The weights of a layer travel while the experts of the layer before compute, and during the compute between
the two layers; the gradients at the same places in the backward pass. As much as fits travels beside the
compute between the layers, such as attention, and the rest beside the experts.
"""

from dataclasses import dataclass

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD


@dataclass(frozen=True)
class TransferSplit:
    """The part of every expert that travels while the experts of the layer before compute.

    Attributes:
        gather: Share of an expert's weights, from 0 to 1.
        reduce: Share of an expert's gradient, from 0 to 1.

    Raises:
        ValueError: A share is out of range.
    """

    gather: float = 0.0
    reduce: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (("gather", self.gather), ("reduce", self.reduce)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}: wanted a share from 0 to 1")


WHOLE = TransferSplit()
"""A split in which nothing travels beside the experts of the layer before."""


def split_transfers(
    gather_s: float, reduce_s: float, *, non_expert_s: float, expert_s: float
) -> TransferSplit:
    """Split transfers by modelled seconds (Pro-Prophet, §V-B, Alg. 2).

    A part that neither piece of compute hides travels with the compute between the layers, which then has to
    wait.

    Args:
        gather_s: Seconds of SparseAllGather.
        reduce_s: Seconds of SparseReduceScatter.
        non_expert_s: Seconds of the forward pass of the compute between two layers (FNEC).
        expert_s: Seconds of the experts' forward pass (FEC).
    """

    def share(busy_s: float, passes: int) -> float:
        """Share of a transfer that travels beside the experts."""
        beside_s = min(max(busy_s - passes * non_expert_s, 0.0), passes * expert_s)
        return beside_s / busy_s if busy_s else 0.0

    return TransferSplit(share(gather_s, 1), share(reduce_s, BACKWARD_PER_FORWARD))
