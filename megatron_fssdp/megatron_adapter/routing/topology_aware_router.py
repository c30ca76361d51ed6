"""FasterMoE's topology-aware gate in Megatron's router (FasterMoE, §4.3).

For debugging, Megatron's router can take the experts of each token from a recorded routing. The gate uses
this extension point (``router_replay``). Scores, probabilities, auxiliary losses, capacities and expert
biases therefore stay Megatron's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.routing.topology_aware_gate import LeavingChoices, select_experts
from megatron_fssdp.megatron_adapter.support.supported_features import (
    Refusal,
    asks_any,
    captured_modules,
    refuse,
)
from megatron_fssdp.planning.placement.topology import Topology

_REFUSALS: tuple[Refusal, ...] = (
    ("a fused router", asks_any("moe_router_fusion"), "remove --moe-router-fusion"),
    (
        "CUDA graphs of the router",
        lambda value: "moe_router" in captured_modules(value),
        "remove moe_router from --cuda-graph-modules",
    ),
    ("replayed routings", asks_any("moe_enable_routing_replay"), "remove --moe-enable-routing-replay"),
    (
        "group-limited routing",
        asks_any("moe_router_group_topk"),
        "remove --moe-router-num-groups and --moe-router-group-topk",
    ),
    (
        "routing by Sinkhorn or by quantiles",
        lambda value: value("moe_router_load_balancing_type") in ("sinkhorn", "quantile_balancing"),
        "use --moe-router-load-balancing-type none or aux_loss",
    ),
)


def check_gate(config: Any) -> None:
    """Refuse, by a ConfigurationError, settings whose router selects experts in a way of its own."""
    refuse("router: topology_aware (router=stock does)", _REFUSALS, config)


@dataclass
class TopologyAwareTopK:
    """Selects the experts of each token instead of the router's top-k.

    Attributes:
        owner_E: Function that returns the current owner of every expert, int64 ``[E]``. Owners may move
            between iterations.
        device: This rank in its expert-parallel group.
        topology: Nodes of the expert-parallel group.
        leaving_share: Fraction of this rank's tokens, 0 to 1, that may leave the node.
        leaving_choices: Choices of a token that the limit is about (:func:`select_experts`).
        scores_are_logits: Whether scores are logits. These are compared after a softmax, because logits of
            different tokens are not comparable.
        layer_number: Number of the layer, which Megatron's router sets.
    """

    owner_E: Callable[[], np.ndarray]
    device: int
    topology: Topology
    leaving_share: float
    leaving_choices: LeavingChoices = "each"
    scores_are_logits: bool = False
    layer_number: int | None = None

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, *_groups: Any, **_more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores ``[T, K]`` and indices, int64 ``[T, K]``, of each token's experts for the router.

        It gives the scores by which it selects, ``[T, E]``, and the number of experts per token, K.
        """
        node_D = np.asarray(self.topology.node_of_device)
        is_near_E = torch.from_numpy(node_D[self.owner_E()] == node_D[self.device]).to(scores.device)
        fit = scores.detach().float()
        if self.scores_are_logits:
            fit = torch.softmax(fit, dim=-1)
        most_leaving = int(self.leaving_share * scores.shape[0])
        indices = select_experts(fit, topk, is_near_E, most_leaving, self.leaving_choices)
        return scores.gather(1, indices), indices


def install_gate(router: Any, gate: TopologyAwareTopK) -> None:
    """Install the topology-aware gate in a router: Megatron's ``TopKRouter`` of one layer.

    Raises:
        ConfigurationError: The router has no attribute ``router_replay``, or the experts of a node are
            fewer than the experts of a token.
    """
    if not hasattr(router, "router_replay"):
        raise ConfigurationError(
            f"router: got {type(router).__name__} without the attribute router_replay, wanted Megatron's "
            "TopKRouter of megatron-core 0.19 or newer; use router=stock"
        )
    config = router.config
    node_D = np.asarray(gate.topology.node_of_device)
    per_node = np.bincount(node_D[gate.owner_E()], minlength=gate.topology.num_nodes)
    if per_node.min() < config.moe_router_topk:
        raise ConfigurationError(
            f"router: got topology_aware with {per_node.min()} experts in a node, wanted at least "
            f"{config.moe_router_topk}, the number of experts per token; use fewer nodes, more experts, or "
            "router=stock"
        )
    is_softmax = config.moe_router_score_function == "softmax"
    gate.scores_are_logits = is_softmax and not config.moe_router_pre_softmax
    router.router_replay = gate
