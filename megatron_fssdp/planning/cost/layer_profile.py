"""What one layer costs on this cluster, measured in a run's first iterations."""

from dataclasses import dataclass

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost, overlap_degree
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import CUDA_MESSAGE_BYTES

STATE_OVER_PARAMETERS = 7
"""Bytes that move with an expert over those of its parameters where nobody says how many: the
parameters, and the six times as much that Adam keeps in mixed precision (Hecate, §2.3)."""


@dataclass(frozen=True)
class LayerProfile:
    """Measured costs of one MoE layer, the same numbers on all ranks that plan together.

    Attributes:
        non_moe_s: Seconds of the compute before the layer, such as attention, forward.
        cluster: Links, and the experts' throughput.
        expert_bytes: Parameters of one expert.
        token_bytes: One token's hidden state.
        flops_per_token: Of one expert's forward pass, for one token.
        memory_capacity: Extra experts that a device can hold for one layer (Hecate §4.2, m).
        gradient_bytes: One expert's gradient on its way home; ``None`` for ``expert_bytes``.
        num_micro_batches: Micro-batches of an iteration.
        owned_bytes: Parameters, masters and optimizer states of one expert on a device that owns it;
            ``None`` if that is not known.
        message_bytes: Most bytes of a message in which a part of an expert travels.
    """

    non_moe_s: float
    cluster: ClusterCost
    expert_bytes: int
    token_bytes: int
    flops_per_token: float
    memory_capacity: int
    gradient_bytes: int | None = None
    num_micro_batches: int = 1
    owned_bytes: int | None = None
    message_bytes: int = CUDA_MESSAGE_BYTES

    @property
    def reduced_bytes(self) -> int:
        """One expert's gradient on its way home."""
        return self.expert_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def moved_bytes(self) -> int:
        """What goes along with one expert to another device that is to train it."""
        return self.owned_bytes or STATE_OVER_PARAMETERS * self.expert_bytes

    def slowest_link(self, topology: Topology) -> LinkCost:
        """Between nodes where there are several and that is the slower one, else inside a node."""
        intra, inter = self.cluster.intra, self.cluster.inter
        between = topology.num_nodes > 1 and inter.beta_s_per_byte > intra.beta_s_per_byte
        return inter if between else intra

    def overlap_degree(self, topology: Topology) -> int:
        """Experts whose transfer the compute before the layer hides (Hecate §4.2, t)."""
        link = self.slowest_link(topology)
        if link.beta_s_per_byte == 0:
            return 0
        return overlap_degree(self.non_moe_s, 1 / link.beta_s_per_byte, self.expert_bytes)
