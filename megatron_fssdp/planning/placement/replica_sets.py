"""Replicas of several placements of one layer, which are compared with each other.

Shape letters: P pairs of expert and device.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class ReplicaSets:
    """Replicas of several placements with the same owners, one placement after the other.

    Attributes:
        expert_P: Expert of each replica, int64 ``[P]``. In each placement, the replicas of an expert come one
            after the other.
        device_P: Device of each replica, int64 ``[P]``.
        ends: Where the replicas of each placement end, int64, one number for each placement.
    """

    expert_P: np.ndarray
    device_P: np.ndarray
    ends: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Number of replicas of each placement, int64."""
        return np.diff(self.ends, prepend=0)
