"""FasterMoE's dynamic shadowing: which experts to bring to all devices (FasterMoE, §4.1, Alg. 1).

Shape letters: E experts, D devices.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD, NUM_ALL_TO_ALLS
from megatron_fssdp.planning.loads.checked_loads import checked_counts


@dataclass(frozen=True)
class ShadowingCosts:
    """What FasterMoE's latencies are made of.

    Attributes:
        token_bytes: One token's hidden state; the paper's ``H``.
        expert_bytes: One expert's parameters; the paper's ``2αH²``.
        gradient_bytes: One expert's gradient.
        flops_per_token: Forward of one expert for one token; the paper's ``4αH²``.
        flops_per_s: Of one device; ``P``.
        bytes_per_s: One bandwidth for all of the network; ``W_net``.
    """

    token_bytes: float
    expert_bytes: int
    gradient_bytes: int
    flops_per_token: float
    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: wanted a positive throughput")

    def compute_s(self, num_tokens: float) -> float:
        """Forward and backward of the device with the most tokens: ``3 · 4·B·αH² / P`` (Eq. 7, 8)."""
        return (1 + BACKWARD_PER_FORWARD) * num_tokens * self.flops_per_token / self.flops_per_s

    def exchange_s(self, num_tokens: float) -> float:
        """Four all-to-alls of the most loaded device's tokens: ``4 · B·H / W_net`` (Eq. 7)."""
        return NUM_ALL_TO_ALLS * num_tokens * self.token_bytes / self.bytes_per_s

    def imbalanced_s(self, num_tokens: float) -> float:
        """Without shadows: compute and all-to-alls of the most loaded device's tokens (Eq. 7)."""
        return self.compute_s(num_tokens) + self.exchange_s(num_tokens)

    def shadowed_s(self, num_shadowed: int, num_tokens: float) -> float:
        """With shadows: compute, a broadcast of weights and a reduction of gradients each (Eq. 8)."""
        moved_bytes = num_shadowed * (self.expert_bytes + self.gradient_bytes)
        return self.compute_s(num_tokens) + moved_bytes / self.bytes_per_s


def select_shadows(
    owner_E: np.ndarray,
    counts_DE: np.ndarray,
    costs: ShadowingCosts,
    *,
    most: int | None = None,
    remaining_exchange: bool = False,
) -> tuple[int, ...]:
    """The experts to bring to all devices (FasterMoE, Alg. 1).

    In descending load, each expert is tried: its tokens then stay where they are. It is taken while
    the modelled latency falls strictly; the first that does not lower it ends the search. A device
    with several experts counts with the sum of their tokens.

    Args:
        owner_E: Owner of every expert, integers [E].
        counts_DE: (token, k) pairs by source and expert, integers [D, E].
        costs: What the latencies are made of.
        most: Most experts to take; None: no bound. The paper has none.
        remaining_exchange: Add to Eq. 8 the all-to-alls of the tokens that still go to an owner, as Eq. 7
            counts them. Eq. 8 as it is forgets them, so its first shadow seems to save all of the dispatch.

    Returns:
        The experts in the order in which they were taken.

    Raises:
        ValueError: Counts that are no counts of these experts.
    """
    counts = checked_counts(counts_DE, len(counts_DE), len(owner_E))
    num_devices = counts.shape[0]
    load_E = counts.sum(axis=0)
    tokens_D = np.bincount(owner_E, weights=load_E, minlength=num_devices)
    exchanged_D = tokens_D.copy()
    least_s = costs.imbalanced_s(float(tokens_D.max()))
    shadowed: list[int] = []
    for expert in np.argsort(-load_E, kind="stable").tolist()[:most]:
        tokens_D[owner_E[expert]] -= load_E[expert]
        tokens_D += counts[:, expert]
        exchanged_D[owner_E[expert]] -= load_E[expert]
        seconds = costs.shadowed_s(len(shadowed) + 1, float(tokens_D.max()))
        if remaining_exchange:
            seconds += costs.exchange_s(float(exchanged_D.max()))
        if not seconds < least_s:
            break
        least_s = seconds
        shadowed.append(expert)
    return tuple(shadowed)
