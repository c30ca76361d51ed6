"""What a strategy is: questions about a layer, answered with data.

Shape legend: D devices of the expert-parallel group, E experts of a layer.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_fssdp.planning.load_history import LoadHistory
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.planning.transfer_plan import TransferPlan


@dataclass(frozen=True, eq=False)
class LayerContext:
    """What a strategy may know of one MoE layer.

    Attributes:
        layer: Megatron's layer number, counted from 1 over the whole model.
        owner_E: Device that keeps each expert's parameters and optimizer state.
        topology: Nodes of the layer's expert-parallel group.
    """

    layer: int
    owner_E: np.ndarray
    topology: Topology

    @property
    def num_experts(self) -> int:
        """Routed experts of the layer."""
        return len(self.owner_E)

    @property
    def num_devices(self) -> int:
        """Ranks of the expert-parallel group."""
        return self.topology.num_devices


@dataclass(frozen=True)
class LayerPlan:
    """One layer's decision for one iteration, executed by the runtime and by the simulator alike.

    Attributes:
        placement: Where each expert's parameters are present.
        transfer: How replicas get there, and their gradients home (the exact transpose).
    """

    placement: ExpertPlacement
    transfer: TransferPlan

    def __post_init__(self) -> None:
        self.transfer.check_serves(self.placement)


class Strategy(Protocol):
    """Decides for one layer; pure given its arguments, so that all ranks decide alike."""

    @property
    def window(self) -> int:
        """Iterations of load history that the strategy looks at; at least 1."""
        ...

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Plan a layer's iteration from the loads of the iterations before it."""
        ...
