"""The process groups of one MoE layer, each with a name."""

from dataclasses import dataclass

import torch.distributed as dist

from megatron_fssdp.planning.placement.group_ring import GroupRing
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
                             parts                     0, 1, 2, 3, 4, 5    (all)
                             tensor_parallel           2, 3                (if these have the same tokens)
                             devices_of_peers          1, 1                (device of rank 2 and of rank 3)

    Attributes:
        expert_parallel: Process group of the ranks that share the layer's experts. Device ``d`` of every plan
            is rank ``d`` of this group.
        topology: Nodes of these ranks.
        transfers: Another process group of the same ranks, only for SparseAllGather and SparseReduceScatter,
            which can then run at the same time as other collectives. With ``None``, they run one after the
            other with the others.
        expert_tensor_parallel: Process group of the ranks that share each of this rank's experts. Every rank
            has one part of an expert's FFN dimension. These peers have different expert-parallel groups and
            exchange different tokens, but have the same topology and plans. ``None`` if experts are whole.
        ring: Groups of expert-parallel ranks with which this rank exchanges rows step by step while the
            experts compute (smart schedule). ``None`` exchanges with all ranks at once.
        parts: Process group of the ranks of all parts of all devices. Part ``x`` of device ``d`` is rank
            ``d * X + x``. ``None`` if experts are whole, or if no schedule sends to all parts at once.
        tensor_parallel: Process group of the ranks that have the same tokens as this one; ``None`` if no
            other rank has them, for example under sequence parallelism.
        devices_of_peers: Device number of each rank of ``tensor_parallel``.
        one_queue: Whether CUDA devices run the kernels of all streams in the order of their issue
            (``CUDA_DEVICE_MAX_CONNECTIONS=1``). Transfers then issue their messages at several points of the
            program. Equal on all ranks.
    """

    expert_parallel: dist.ProcessGroup
    topology: Topology
    transfers: dist.ProcessGroup | None = None
    expert_tensor_parallel: dist.ProcessGroup | None = None
    ring: GroupRing | None = None
    parts: dist.ProcessGroup | None = None
    tensor_parallel: dist.ProcessGroup | None = None
    devices_of_peers: tuple[int, ...] = ()
    one_queue: bool = False

    def __post_init__(self) -> None:
        if self.expert_parallel.size() != self.topology.num_devices:
            raise ValueError(
                f"topology: got {self.topology.num_devices} devices, wanted the "
                f"{self.expert_parallel.size()} ranks of the expert-parallel group"
            )
        if self.parts is not None:
            size, rank = self.num_devices * self.num_parts, self.device * self.num_parts + self.peer
            if (self.parts.size(), self.parts.rank()) != (size, rank):
                raise ValueError(
                    f"parts: got rank {self.parts.rank()} of {self.parts.size()}, wanted rank {rank} of "
                    f"{size} for part {self.peer} of {self.num_parts} of device {self.device}"
                )

    @property
    def device(self) -> int:
        """This rank's device number."""
        return self.expert_parallel.rank()

    @property
    def num_devices(self) -> int:
        """Number of devices: ranks of the expert-parallel group."""
        return self.topology.num_devices

    @property
    def peer(self) -> int:
        """Number of this rank among its expert-tensor-parallel peers, and of its part of each expert."""
        return 0 if self.expert_tensor_parallel is None else self.expert_tensor_parallel.rank()

    @property
    def num_parts(self) -> int:
        """Number of parts of each expert: ranks that share an expert."""
        return 1 if self.expert_tensor_parallel is None else self.expert_tensor_parallel.size()
