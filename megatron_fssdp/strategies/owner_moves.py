"""The cost of moving experts to other owners.

Shape letters: L MoE layers, E experts.
"""

import numpy as np

from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import moving_seconds
from megatron_fssdp.planning.placement.topology import Topology


def exchange_s(old_E: np.ndarray, new_E: np.ndarray, profile: LayerProfile, topology: Topology) -> float:
    """Seconds to move weights and optimizer states of the experts whose device changes.

    Args:
        old_E: Owner of every expert before the move, integers ``[E]``, or of all layers ``[L, E]``.
        new_E: Owner of every expert after the move, in the same shape.
        profile: Measured costs of the layer.
        topology: Nodes of the devices.
    """
    moves = old_E != new_E
    return moving_seconds(old_E[moves], new_E[moves], topology, profile)
