"""Messages of tensor, context and pipeline parallelism, and of gradients, and their seconds.

Ranks have Megatron's order: tensor, context, data, pipeline. A group of consecutive ranks in one node uses
the links inside it. Otherwise each ring leaves a node once.

* **Tensor parallelism** with sequence parallelism (Korthikanti et al. 2022, §4.2.2): an all-gather before and
  a reduce-scatter behind attention, a dense MLP, and shared experts. In each, one of t ranks sends t - 1
  times its part of the hidden states. The backward pass has as many; compute hides its further all-gather.
* **Context parallelism** (ring attention, Liu et al. 2023): one of c ranks sends keys and values on c - 1
  times, while it computes attention to those that it has, and waits for what takes longer than this. In the
  backward pass their gradients travel too, and compute is twice as long.
* **Pipeline stages** (Narayanan et al. 2021, §2.2, §3.2): a micro-batch's hidden states travel forward and
  their gradient back, once for each model chunk. The stage waits for them. An interleaved schedule hides them
  behind other passes, so that they count only in the bubble.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.link_seconds import LinkSet, cluster_links
from megatron_fssdp.planning.dispatch.token_dispatch import BusiestLinks


@dataclass(frozen=True)
class DenseMessages:
    """Sizes of the messages of one rank in a micro-batch's forward pass."""

    tensor_size: int = 1
    context_size: int = 1
    stage_ranks: int = 1  # ranks of one pipeline stage
    num_stages: int = 1
    hidden_bytes: float = 0.0  # the rank's part of the hidden states
    keys_bytes: float = 0.0  # keys and values that one step of a ring sends on
    scores_flops: float = 0.0  # attention matrices of a layer
    shared_experts: bool = False
    # Dense layers before each MoE layer of the stage and behind the last, and how many are recomputed.
    dense_layers: tuple[tuple[int, int], ...] = ()


class MessageSeconds(NamedTuple):
    """Seconds of a forward pass and of a backward pass."""

    forward_s: float = 0.0
    backward_s: float = 0.0


NO_MESSAGES = MessageSeconds()


class DenseSeconds(NamedTuple):
    """Seconds that a device waits for messages in a micro-batch.

    Those of tensor and context parallelism are of one MoE layer (``of_moe``), and of the dense layers before
    each MoE layer, from 0, and behind the last (``of_dense``). ``of_stage_s`` is a message between stages.
    """

    of_moe: MessageSeconds
    of_dense: dict[int, MessageSeconds]
    of_stage_s: float


@dataclass(frozen=True)
class RankLinks:
    """Links of the ranks of a cluster, whose devices are groups of ``num_peers`` ranks."""

    cluster: ClusterDescription
    num_peers: int = 1

    def message_s(
        self, links: LinkSet, num_ranks: int, num_groups: int, num_bytes: float, *, spreads: bool = False
    ) -> float:
        """Seconds in which each of ``num_ranks`` consecutive ranks sends bytes to the next of its ring.

        They form ``num_groups`` rings, each of ranks at this distance. A collective ``spreads`` what leaves a
        node over the NICs of its group's devices.
        """
        per_node = self.cluster.devices_per_node * self.num_peers
        if self.cluster.num_nodes == 1 or num_ranks <= per_node:
            return links.times(BusiestLinks(near=1), num_bytes).seconds
        leaving = min(num_groups, per_node)
        of_node = leaving / self.num_peers  # a device has the NICs of all its ranks
        of_device = leaving / per_node if spreads else 1.0
        busiest = BusiestLinks(float(leaving < per_node), of_device, of_node, of_node)
        return links.times(busiest, num_bytes).seconds

    def reduction_s(self, num_ranks: int, num_groups: int, num_bytes: float) -> float:
        """Seconds of a ring all-reduce of bytes that ``num_ranks`` ranks of each of so many groups have."""
        if num_ranks == 1:
            return 0.0
        sent_bytes = 2 * (num_ranks - 1) / num_ranks * num_bytes
        links = cluster_links(self.cluster).transfer
        return self.message_s(links, num_ranks * num_groups, num_groups, sent_bytes, spreads=True)

    def dense_seconds(self, sizes: DenseMessages) -> DenseSeconds:
        """Price the messages of dense layers."""
        links, block_s, ring_s, of_stage_s = cluster_links(self.cluster), 0.0, 0.0, 0.0
        tensor, context, ranks = sizes.tensor_size, sizes.context_size, sizes.stage_ranks
        if tensor > 1:
            sent_bytes = (tensor - 1) * sizes.hidden_bytes
            block_s = 2 * self.message_s(links.counts, tensor, 1, sent_bytes, spreads=True)
        if context > 1:
            compute_s = sizes.scores_flops / context / self.cluster.non_expert_flops_per_s
            step_s = self.message_s(links.transfer, tensor * context, tensor, sizes.keys_bytes)
            ring_s = (context - 1) * max(step_s - compute_s, 0.0)
        if sizes.num_stages > 1:
            of_stage_s = self.message_s(links.transfer, ranks * sizes.num_stages, ranks, sizes.hidden_bytes)

        def layers(num_blocks: int, number: int = 1, again: int = 0) -> MessageSeconds:
            forward_s = num_blocks * block_s + ring_s
            backward_s = num_blocks * block_s + BACKWARD_PER_FORWARD * ring_s
            return MessageSeconds(number * forward_s, number * backward_s + again * forward_s)

        of_dense = {place: layers(2, *numbers) for place, numbers in enumerate(sizes.dense_layers)}
        return DenseSeconds(layers(1 + sizes.shared_experts), of_dense, of_stage_s)
