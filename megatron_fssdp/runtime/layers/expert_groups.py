"""The process groups of one MoE layer, each with a name."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.transfer_lanes import advance_transfers
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.slots.node_slots import NodeSlots


@dataclass(frozen=True)
class ExpertGroups:
    """Process groups and nodes that one MoE layer works with, seen from one rank.

    A "device" of a plan is a rank of ``expert_parallel``. Under expert tensor parallelism, each device
    consists of X ranks, and each of these ranks has one part of every expert of the device. These peers have
    different expert-parallel groups and exchange different tokens, but have the same topology and plans. An
    example with 6 ranks, 3 devices and X = 2::

                     device 0    device 1    device 2
        part 0        rank 0      rank 2      rank 4
        part 1        rank 1      rank 3      rank 5

        groups of rank 2:    expert_parallel           0, 2, 4             (its row)
                             transfers                 0, 2, 4             (its row, a second process group)
                             expert_tensor_parallel    2, 3                (its column)
                             everyone                  0, 1, 2, 3, 4, 5    (all)
    """

    expert_parallel: dist.ProcessGroup
    topology: Topology  # nodes of these ranks
    # Only for SparseAllGather and SparseReduceScatter, which run at the same time as other collectives. None
    # if the strategy has no transfers.
    transfers: dist.ProcessGroup | None = None
    expert_tensor_parallel: dist.ProcessGroup | None = None  # None if experts are whole
    # Megatron's tp_ep: part x of device d is rank d X + x. None stands for ``expert_parallel``.
    everyone: dist.ProcessGroup | None = None
    # CUDA devices run the kernels of all streams in the order of their issue (``transfer_lanes.py``).
    one_queue: bool = False
    # Slots that devices of this node write to; None if weights travel in messages alone.
    node: NodeSlots | None = None

    def __post_init__(self) -> None:
        if self.expert_parallel.size() != self.topology.num_devices:
            raise ValueError(
                f"topology: got {self.topology.num_devices} devices, wanted the "
                f"{self.expert_parallel.size()} ranks of the expert-parallel group"
            )

    @property
    def device(self) -> int:
        """This rank's device number."""
        return self.expert_parallel.rank()

    @property
    def num_devices(self) -> int:
        """Number of expert-parallel ranks."""
        return self.topology.num_devices

    def advance_transfers(self, hidden: torch.Tensor | None = None) -> None:
        """Mark a point of the passes with ``hidden``, the same on all ranks, for devices with one queue."""
        if self.transfers is not None:
            advance_transfers(self.transfers, hidden)
