"""Costs of links and devices, and the constants of a layer's forward and backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NUM_ALL_TO_ALLS = 4
"""All-to-alls of a layer: dispatch and combine, in the forward and the backward pass (FasterMoE, Eq. 7)."""

BACKWARD_PER_FORWARD = 2
"""Compute of a backward pass (gradients of inputs and weights) over a forward pass's (FasterMoE, Eq. 7)."""

LEAST_BETA_S_PER_BYTE = 1e-13
"""Lower limit of a fitted cost, 10 TB/s. Without it, a fit to noise could give a link that costs nothing."""


class LinkCost(NamedTuple):
    """Seconds of one transfer over a link: ``alpha + beta * bytes`` (Parm, §V, Eq. 12)."""

    alpha_s: float
    beta_s_per_byte: float

    def time_s(self, num_bytes: float) -> float:
        """Seconds of a transfer. One of 0 bytes costs nothing."""
        return self.alpha_s + self.beta_s_per_byte * num_bytes if num_bytes > 0 else 0.0


FREE = LinkCost(0.0, 0.0)


def fit_link_cost(num_bytes: Sequence[float], seconds: Sequence[float]) -> LinkCost:
    """Fit ``alpha + beta * bytes`` to positive seconds by least relative squares (Parm §V, Eq. 12)."""
    sizes, times = np.asarray(num_bytes, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    (alpha_s, beta_s_per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    # A cost below its limit is set to the limit, and the other one is fitted alone.
    if alpha_s < 0:
        alpha_s, beta_s_per_byte = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    elif beta_s_per_byte < LEAST_BETA_S_PER_BYTE:
        alpha_s, beta_s_per_byte = columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), LEAST_BETA_S_PER_BYTE
    return LinkCost(float(alpha_s), max(LEAST_BETA_S_PER_BYTE, float(beta_s_per_byte)))


@dataclass(frozen=True)
class LinkFit:
    """A fitted cost, the explained share of the variance, and the worst relative error."""

    cost: LinkCost
    r_squared: float
    worst_relative_error: float

    @classmethod
    def of(cls, num_bytes: Sequence[float], seconds: Sequence[float]) -> "LinkFit":
        """Fit a cost by :func:`fit_link_cost` and compute its errors."""
        cost = fit_link_cost(num_bytes, seconds)
        times = np.asarray(seconds, float)
        errors = np.array([cost.time_s(size) for size in num_bytes]) - times
        variance = ((times - times.mean()) ** 2).sum()
        r_squared = 1 - (errors**2).sum() / variance if variance > 0 else 1.0
        return cls(cost, float(r_squared), float(np.abs(errors / times).max()))


@dataclass(frozen=True)
class ClusterCost:
    """Costs of one direction of a device's link in its node and of a node's NICs; throughput on experts.

    ``inter_device`` is the cost of the NICs when one device sends alone; zero if unknown.
    """

    intra: LinkCost
    inter: LinkCost
    expert_flops_per_s: float
    inter_device: LinkCost = FREE
