"""Costs of links and devices, and the constants of a layer's two passes.

What a whole layer costs is in ``layer_seconds.py``. Shape letters: D devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.dispatch.token_dispatch import TokenDispatch

NUM_ALL_TO_ALLS = 4
"""Dispatch and combine, forward and backward (FasterMoE, Eq. 7)."""

BACKWARD_PER_FORWARD = 2
"""The backward computes gradients of inputs and of weights (FasterMoE, Eq. 7)."""

LEAST_BETA_S_PER_BYTE = 1e-13
"""10 TB/s: a fit to noise must not give a link without a cost."""


@dataclass(frozen=True)
class LinkCost:
    """Seconds of one transfer over a link: ``alpha + beta * bytes`` (Parm, §V, Eq. 12).

    Attributes:
        alpha_s: Seconds to start, whatever the size.
        beta_s_per_byte: Seconds for each byte, the inverse of the bandwidth.
    """

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        for name, value in (("alpha_s", self.alpha_s), ("beta_s_per_byte", self.beta_s_per_byte)):
            if not np.isfinite(value) or value < 0:
                raise ValueError(
                    f"{name} is {value}: wanted a finite number of 0 or more; fit it to measured times again"
                )

    def time_s[Amount: (float, np.ndarray)](self, num_bytes: Amount) -> Amount:
        """Seconds for ``num_bytes``, or for each of an array; nothing to send costs nothing."""
        return (num_bytes > 0) * (self.alpha_s + self.beta_s_per_byte * num_bytes)


def fit_link_cost(num_bytes: Sequence[float], seconds: Sequence[float]) -> LinkCost:
    """``alpha + beta * bytes`` by least squares of relative errors (Parm §V, Eq. 12).

    Args:
        num_bytes: Sizes of the messages.
        seconds: What each of them took; positive.
    """
    sizes, times = np.asarray(num_bytes, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    (alpha_s, beta_s_per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    # Of the two costs that may not be negative, one at its limit leaves the best other one alone.
    if alpha_s < 0:
        alpha_s, beta_s_per_byte = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    elif beta_s_per_byte < LEAST_BETA_S_PER_BYTE:
        alpha_s, beta_s_per_byte = columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), LEAST_BETA_S_PER_BYTE
    return LinkCost(float(alpha_s), max(LEAST_BETA_S_PER_BYTE, float(beta_s_per_byte)))


@dataclass(frozen=True)
class LinkFit:
    """A fitted cost and how well it says what was measured.

    Attributes:
        cost: The cost.
        r_squared: Share of the measured seconds' variance that it explains; 1 where they all are the same.
        worst_relative_error: Of all sizes, the largest ``|fitted - measured| / measured``.
    """

    cost: LinkCost
    r_squared: float
    worst_relative_error: float

    @classmethod
    def of(cls, num_bytes: Sequence[float], seconds: Sequence[float]) -> "LinkFit":
        """Fit as :func:`fit_link_cost` does, and look back."""
        cost = fit_link_cost(num_bytes, seconds)
        times = np.asarray(seconds, float)
        errors = np.array([cost.time_s(size) for size in num_bytes]) - times
        variance = ((times - times.mean()) ** 2).sum()
        r_squared = 1 - (errors**2).sum() / variance if variance > 0 else 1.0
        return cls(cost, float(r_squared), float(np.abs(errors / times).max()))


@dataclass(frozen=True)
class ClusterCost:
    """Links and compute of a cluster of equal devices.

    Attributes:
        intra: One direction of one device's link inside its node.
        inter: One direction of one node's NIC.
        expert_flops_per_s: Throughput of one device on expert GEMMs.
    """

    intra: LinkCost
    inter: LinkCost
    expert_flops_per_s: float

    def __post_init__(self) -> None:
        if not self.expert_flops_per_s > 0:
            raise ValueError(
                f"expert_flops_per_s is {self.expert_flops_per_s}: wanted a positive throughput in flops/s"
            )


def dispatch_tokens_DD(dispatch: TokenDispatch, num_devices: int) -> np.ndarray:
    """(token, k) pairs that each device sends to each, int64 [D, D]; the diagonal stays."""
    return np.stack([dispatch.from_source(source).sum(axis=0) for source in range(num_devices)])


def overlap_degree(non_moe_s: float, bandwidth_bytes_per_s: float, expert_bytes: int) -> int:
    """Experts whose transfer hides under ``non_moe_s``: ``t = T_nonMoE * bw / size``, floored (Hecate, §4.2).

    Args:
        non_moe_s: Seconds of the compute before the layer, such as attention.
        bandwidth_bytes_per_s: Between nodes where there are several and that is slower, else between devices.
        expert_bytes: Parameters of one expert.
    """
    if expert_bytes <= 0:
        raise ValueError(f"expert_bytes is {expert_bytes}: wanted the bytes of one expert's parameters")
    if not (np.isfinite(non_moe_s * bandwidth_bytes_per_s) and non_moe_s >= 0 and bandwidth_bytes_per_s >= 0):
        raise ValueError(
            f"non_moe_s is {non_moe_s} and bandwidth_bytes_per_s is {bandwidth_bytes_per_s}: wanted finite "
            "numbers of 0 or more; measure them again"
        )
    return int(non_moe_s * bandwidth_bytes_per_s / expert_bytes)


def exposed_s[Amount: (float, np.ndarray)](busy_s: Amount, hidden_under_s: Amount | float) -> Amount:
    """Seconds of a transfer that the compute beside it does not hide (Pro-Prophet, Eq. 8)."""
    exposed: Amount = np.maximum(0.0, busy_s - hidden_under_s)
    return exposed
