"""FasterMoE's topology-aware gate in Megatron's router (FasterMoE, §4.3).

Megatron lets a replay of recorded routings choose the experts, for debugging. The gate sits in that
place, so scores, probabilities, auxiliary losses, capacities and expert biases stay Megatron's own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.support.supported_features import Refusal, refuse
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.topology_aware_gate import choose_experts

_REFUSALS: tuple[Refusal, ...] = (
    (
        "a fused router",
        lambda value: bool(value("moe_router_fusion")),
        "drop --moe-router-fusion",
    ),
    (
        "replayed routings",
        lambda value: bool(value("moe_enable_routing_replay")),
        "drop --moe-enable-routing-replay",
    ),
    (
        "group-limited routing",
        lambda value: bool(value("moe_router_group_topk")),
        "drop --moe-router-num-groups and --moe-router-group-topk",
    ),
    (
        "routing by Sinkhorn or by quantiles",
        lambda value: value("moe_router_load_balancing_type") in ("sinkhorn", "quantile_balancing"),
        "use --moe-router-load-balancing-type none or aux_loss",
    ),
)


def check_gate(config: Any) -> None:
    """Refuse a model whose router chooses experts in another way.

    Args:
        config: Megatron's parsed arguments or a ``TransformerConfig``.

    Raises:
        ConfigurationError: With what is refused and what to do.
    """
    refuse("router: topology_aware (router=stock does)", _REFUSALS, config)


class TopologyAwareTopK:
    """Chooses the experts in place of the router's top-k.

    Args:
        owner_E: Gives the device of every expert as it is now; owners may move between iterations.
        device: This rank in its expert-parallel group.
        topology: Nodes of the group.
        leaving_share: Part of this rank's tokens that may leave the node, for each choice.
        scores_are_logits: Whether the scores are not comparable among tokens before a softmax.
    """

    def __init__(
        self,
        owner_E: Callable[[], np.ndarray],
        device: int,
        topology: Topology,
        leaving_share: float,
        *,
        scores_are_logits: bool,
    ) -> None:
        self.layer_number: int | None = None  # the router tells it
        self._owner_E = owner_E
        self._device = device
        self._node_D = np.asarray(topology.node_of_device)
        self._leaving_share = leaving_share
        self._scores_are_logits = scores_are_logits

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, *_groups: Any, **_more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and indices of every token's experts, ``[T, K]`` each; the router's own call.

        Args:
            scores: What the router chooses by, ``[T, E]``.
            topk: Choices of a token.
        """
        node_E = self._node_D[self._owner_E()]
        is_near_E = torch.from_numpy(node_E == self._node_D[self._device]).to(scores.device)
        fit = scores.detach().float()
        if self._scores_are_logits:
            fit = torch.softmax(fit, dim=-1)
        most_leaving = int(self._leaving_share * scores.shape[0])
        indices = choose_experts(fit, topk, is_near_E, most_leaving)
        return scores.gather(1, indices), indices


def install_gate(
    router: Any, owner_E: Callable[[], np.ndarray], device: int, topology: Topology, leaving_share: float
) -> None:
    """Put the gate into a router.

    Args:
        router: Megatron's ``TopKRouter`` of one layer.
        owner_E: Gives the device of every expert.
        device: This rank in its expert-parallel group.
        topology: Nodes of the group.
        leaving_share: Part of this rank's tokens that may leave the node, for each choice.

    Raises:
        ConfigurationError: The router has no such place, or a node has fewer experts than a token chooses.
    """
    if not hasattr(router, "router_replay"):
        raise ConfigurationError(
            f"router: got {type(router).__name__} without a place for another choice of experts, wanted "
            "Megatron's TopKRouter of megatron-core 0.19 or newer; use router=stock"
        )
    config = router.config
    per_node = np.bincount(np.asarray(topology.node_of_device)[owner_E()], minlength=topology.num_nodes)
    if per_node.min() < config.moe_router_topk:
        raise ConfigurationError(
            f"router: got topology_aware with {per_node.min()} experts in a node, wanted at least the "
            f"{config.moe_router_topk} that a token chooses; use fewer nodes, more experts, or router=stock"
        )
    router.router_replay = TopologyAwareTopK(
        owner_E,
        device,
        topology,
        leaving_share,
        scores_are_logits=(
            config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax
        ),
    )
