"""The process groups of one MoE layer, passed in by name."""

from dataclasses import dataclass

import torch.distributed as dist

from megatron_fssdp.planning.placement.group_ring import GroupRing
from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True)
class ExpertGroups:
    """Groups and node layout that one MoE layer works with.

    Attributes:
        expert_parallel: The ranks that share the layer's experts; device ``d`` of
            every plan is group rank ``d`` of it.
        topology: Nodes of those ranks.
        transfers: The same ranks once more, for SparseAllGather and SparseReduceScatter alone:
            they may then run beside everything else. Without it they run in turn.
        expert_tensor_parallel: The ranks that share each of this rank's experts, every one with a
            part of its FFN dimension. These peers have different tokens and expert-parallel groups,
            and the same topology and plans. ``None`` where experts are whole.
        ring: The expert-parallel ranks in groups, which rows are exchanged with in turn while the experts
            compute; ``None`` exchanges with all at once.
        parts: The ranks of all parts of all devices: those of the expert-parallel groups of this rank's
            expert-tensor-parallel peers. Part ``x`` of device ``d`` is rank ``d * X + x``. ``None`` where
            experts are whole, or where nobody sends to all parts at once.
        tensor_parallel: The ranks with the same tokens as this one; ``None`` where there are none, as
            under sequence parallelism.
        devices_of_peers: The device number of each of these.
    """

    expert_parallel: dist.ProcessGroup
    topology: Topology
    transfers: dist.ProcessGroup | None = None
    expert_tensor_parallel: dist.ProcessGroup | None = None
    ring: GroupRing | None = None
    parts: dist.ProcessGroup | None = None
    tensor_parallel: dist.ProcessGroup | None = None
    devices_of_peers: tuple[int, ...] = ()

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
        """Ranks of the expert-parallel group."""
        return self.topology.num_devices

    @property
    def peer(self) -> int:
        """This rank's number among its expert-tensor-parallel peers."""
        return 0 if self.expert_tensor_parallel is None else self.expert_tensor_parallel.rank()

    @property
    def num_parts(self) -> int:
        """Ranks that share an expert."""
        return 1 if self.expert_tensor_parallel is None else self.expert_tensor_parallel.size()
