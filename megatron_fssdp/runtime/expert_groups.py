"""The process groups of one MoE layer, passed in by name."""

from dataclasses import dataclass

import torch.distributed as dist

from megatron_fssdp.planning.group_ring import GroupRing
from megatron_fssdp.planning.topology import Topology


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
    """

    expert_parallel: dist.ProcessGroup
    topology: Topology
    transfers: dist.ProcessGroup | None = None
    expert_tensor_parallel: dist.ProcessGroup | None = None
    ring: GroupRing | None = None

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
        """Ranks of the expert-parallel group."""
        return self.topology.num_devices

    @property
    def peer(self) -> int:
        """This rank's number among its expert-tensor-parallel peers."""
        return 0 if self.expert_tensor_parallel is None else self.expert_tensor_parallel.rank()
