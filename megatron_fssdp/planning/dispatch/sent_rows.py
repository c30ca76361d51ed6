"""The rows that one source sends: one chunk for each pair of an expert and a device that gets some.

A table of all experts and devices would be almost empty, because an expert has few holders.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class SentRows:
    """Tokens of one source, by expert and receiving device. All arrays are int64.

    Attributes:
        expert_P: Expert of each chunk, ascending, ``[P]``.
        device_P: Receiving device of each chunk, ascending for each expert, ``[P]``.
        tokens_P: Tokens of each chunk, 0 or more, ``[P]``.
    """

    expert_P: np.ndarray
    device_P: np.ndarray
    tokens_P: np.ndarray

    def table_ED(self, num_experts: int, num_devices: int) -> np.ndarray:
        """The tokens by expert and receiving device, int64 ``[E, D]``.

        Args:
            num_experts: Number of experts, E.
            num_devices: Number of devices, D.
        """
        table_ED = np.zeros((num_experts, num_devices), np.int64)
        table_ED[self.expert_P, self.device_P] = self.tokens_P
        return table_ED
