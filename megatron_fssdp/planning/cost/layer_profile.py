"""Costs of one layer on the cluster of a run, measured in its first iterations."""

from dataclasses import dataclass, fields, replace
from functools import cached_property

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.link_seconds import LinkSet
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import (
    BATCH_HOST_S,
    CUDA_MESSAGES,
    HOST_MESSAGES,
    MessageRule,
)

STATE_OVER_PARAMETERS = 7
"""Bytes that move with an expert over its parameters', with Adam in mixed precision (Hecate, §2.3)."""

EXACT_SHARES_S = 1e-4
"""Seconds of exact shares on a GPU where no run has measured them. An assumption: no GPU's time is known.

Exact shares add two kernels to those of a share table: a sum of counts, and one whose single program goes
eleven times over matrices ``[D, E]``. Prices count the gather between them apart.
"""


@dataclass(frozen=True)
class LayerProfile:
    """Measured costs of one MoE layer, the same numbers on all ranks that plan together.

    Attributes:
        non_moe_s: Seconds of the forward pass of the compute before the layer, such as attention.
        token_bytes: Bytes of one token's hidden state.
        flops_per_token: Floating-point operations of one expert's forward pass for one token.
        memory_capacity: Number of replicas that a device can hold for one layer (Hecate §4.2, m), and
            ``mixed_capacity`` those that a layer can keep for the iteration, hold for a pass, or for each
            micro-batch in flight, if each layer decides (``planning/memory.py``).
        gradient_bytes: Bytes of one expert's gradient as it is sent; ``None`` means ``expert_bytes``.
        owned_bytes: Bytes of an expert with its master weights and optimizer states; ``None`` if unknown.
        messages: How a transfer divides an expert into messages.
        choices: What is known about the experts of the tokens; ``None`` if nothing is.
        deduplicated: Whether prices count the deduplicated exchange, which needs ``choices``. Those that are
            fused count tokens in any case.
        exact_shares_s: Seconds in which the device computes exact shares of a micro-batch.
        trained_share: Part of an expert's parameters that have gradients; less than 1 with adapters (LoRA).
    """

    non_moe_s: float
    cluster: ClusterCost
    expert_bytes: int
    token_bytes: int
    flops_per_token: float
    memory_capacity: int
    mixed_capacity: tuple[int, int, int] | None = None
    gradient_bytes: int | None = None
    num_micro_batches: int = 1
    owned_bytes: int | None = None
    messages: MessageRule = CUDA_MESSAGES
    choices: TokenChoices | None = None
    deduplicated: bool = False
    exact_shares_s: float = EXACT_SHARES_S
    trained_share: float = 1.0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, because each price looks for its costs by the profile."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def sent_choices(self) -> TokenChoices | None:
        """The ``choices``, which travel with the tokens, if each token is sent once to a node."""
        is_fused = self.choices is not None and self.choices.is_fused
        return self.choices if self.deduplicated or is_fused else None

    @property
    def reduced_bytes(self) -> int:
        """Bytes of one expert's gradient as it is sent to the owner."""
        return self.expert_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that move when one expert gets a new owner or a new resident replica."""
        return self.owned_bytes or STATE_OVER_PARAMETERS * self.expert_bytes

    @cached_property
    def links(self) -> LinkSet:
        """The cluster's links, with the same costs for every kind of transfer."""
        return LinkSet(self.cluster.intra, self.cluster.inter, self.cluster.inter_device)

    def slowest_link(self, topology: Topology) -> LinkCost:
        """Cost of the link between nodes if there are several and it has less bandwidth; or inside a node."""
        intra, inter = self.cluster.intra, self.cluster.inter
        between = topology.num_nodes > 1 and inter.beta_s_per_byte > intra.beta_s_per_byte
        return inter if between else intra

    def overlap_degree(self, topology: Topology) -> int:
        """Experts whose transfer hides before the layer: ``t = ⌊T_nonMoE · bw / size⌋`` (Hecate, §4.2)."""
        beta_s_per_byte = self.slowest_link(topology).beta_s_per_byte
        return int(self.non_moe_s / beta_s_per_byte / self.expert_bytes) if beta_s_per_byte else 0


def measured_messages(cluster: ClusterCost, *, on_cuda: bool) -> MessageRule:
    """The rule of messages for links of known costs. Between CPUs, it is the same for all links."""
    if not on_cuda:
        return HOST_MESSAGES
    near = cluster.intra
    links = (near, cluster.inter, cluster.inter_device)
    far = max(links, key=lambda link: link.beta_s_per_byte)
    near_bytes, far_bytes = (max(link.alpha_s, BATCH_HOST_S) / link.beta_s_per_byte for link in (near, far))
    return replace(CUDA_MESSAGES, near_bytes=near_bytes, far_bytes=far_bytes)
