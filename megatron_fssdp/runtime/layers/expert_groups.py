"""The process groups of one MoE layer, each with a name."""

from dataclasses import dataclass

import torch.distributed as dist

from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True)
class ExpertGroups:
    """Process groups and nodes that one MoE layer works with, seen from one rank.

    A "device" of a plan is an expert-parallel rank. Under expert tensor parallelism, each device consists of
    X ranks, and each of these ranks has one part of every expert of the device. An example with 6 ranks,
    3 devices and X = 2::

                     device 0    device 1    device 2
        part 0        rank 0      rank 2      rank 4
        part 1        rank 1      rank 3      rank 5

        groups of rank 2:    expert_parallel           0, 2, 4             (its row)
                             transfers                 0, 2, 4             (its row, a second process group)
                             expert_tensor_parallel    2, 3                (its column)
                             everyone                  0, 1, 2, 3, 4, 5    (all)

    Attributes:
        expert_parallel: Process group of the ranks that share the layer's experts. Device ``d`` of every plan
            is rank ``d`` of this group.
        topology: Nodes of these ranks.
        transfers: Another process group of the same ranks, only for SparseAllGather and SparseReduceScatter,
            which run at the same time as other collectives. ``None`` if the strategy has no transfers.
        expert_tensor_parallel: Process group of the ranks that share each of this rank's experts. Every rank
            has one part of an expert's FFN dimension. These peers have different expert-parallel groups and
            exchange different tokens, but have the same topology and plans. ``None`` if experts are whole.
        everyone: Process group of all parts of all devices, Megatron's ``tp_ep``. Part ``x`` of device ``d``
            is rank ``d X + x``. ``None`` stands for ``expert_parallel``.
        one_queue: Whether CUDA devices run the kernels of all streams in the order of their issue
            (``CUDA_DEVICE_MAX_CONNECTIONS=1``). Transfers then issue their messages at several points of the
            program. Equal on all ranks.

    Raises:
        ValueError: The size of the expert-parallel group does not fit the topology.
    """

    expert_parallel: dist.ProcessGroup
    topology: Topology
    transfers: dist.ProcessGroup | None = None
    expert_tensor_parallel: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None
    one_queue: bool = False

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
        """Number of devices."""
        return self.topology.num_devices
