"""FasterMoE's topology-aware gate in Megatron's router (FasterMoE, §4.3).

The gate uses ``router_replay``, by which Megatron's router can take recorded experts for debugging. Scores,
probabilities, auxiliary losses, capacities and expert biases therefore stay Megatron's own.

Shape letters: T tokens, E experts, K choices per token.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.placement.topology import Topology


@dataclass
class TopologyAwareTopK:
    """Selects the experts of each token instead of the router's top-k.

    Scores that are logits are compared after a softmax, because those of different tokens are not comparable.
    """

    owner_E: np.ndarray  # of every expert, int64 [E]; strategies with this gate move no owners
    device: int  # this rank in its expert-parallel group
    topology: Topology  # nodes of that group
    leaving_share: float  # of this rank's tokens, 0 to 1, that may leave the node
    scores_are_logits: bool = False
    layer_number: int | None = None  # Megatron's router sets it.

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, *_groups: Any, **_more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and indices (int64) of each token's experts, ``[T, K]``, from scores ``[T, E]``."""
        node_D = np.asarray(self.topology.node_of_device)
        is_near_E = torch.from_numpy(node_D[self.owner_E] == node_D[self.device]).to(scores.device)
        fit = scores.detach().float()
        if self.scores_are_logits:
            fit = torch.softmax(fit, dim=-1)
        most_leaving = int(self.leaving_share * scores.shape[0])
        indices = select_experts(fit, topk, is_near_E, most_leaving)
        return scores.gather(1, indices), indices


def install_gate(router: Any, gate: TopologyAwareTopK) -> None:
    """Install the gate in Megatron's ``TopKRouter``; a node with too few experts is a ConfigurationError."""
    config = router.config
    node_D = np.asarray(gate.topology.node_of_device)
    per_node = np.bincount(node_D[gate.owner_E], minlength=gate.topology.num_nodes)
    if per_node.min() < config.moe_router_topk:
        raise ConfigurationError(
            f"router: got topology_aware with {per_node.min()} experts in a node, wanted at least "
            f"{config.moe_router_topk}, the number of experts per token; use fewer nodes, more experts, or "
            "router=stock"
        )
    is_softmax = config.moe_router_score_function == "softmax"
    gate.scores_are_logits = is_softmax and not config.moe_router_pre_softmax
    router.router_replay = gate


@torch.no_grad()
def select_experts(
    fit_TE: torch.Tensor, top_k: int, is_near_E: torch.Tensor, most_leaving: int
) -> torch.Tensor:
    """Return each token's experts in order of selection, int64 ``[T, K]``; only few tokens leave the node.

    A token wants to leave if its best expert is in another node. Of these tokens, the ``most_leaving`` with
    the highest fit leave. Ties go to the lower expert and the lower token. The K experts of a token are
    selected one after another, and the limit holds for each of these selections. A token that may not leave
    takes the best expert that is left with an owner in this rank's node (``is_near_E``, at least K).
    """
    lowest, open_TE, selections = torch.finfo(fit_TE.dtype).min, fit_TE.clone(), []
    for _ in range(top_k):
        # Sorts are stable, because argmax does not define which of equal values it returns.
        fit_T, best_T = (of_TE[:, 0] for of_TE in torch.sort(open_TE, descending=True, stable=True))
        near_TE = torch.sort(open_TE.masked_fill(~is_near_E, lowest), descending=True, stable=True).indices
        leaves_T = ~is_near_E[best_T]
        goes_T = torch.zeros_like(leaves_T)
        # Tokens whose best expert is near are last in this order, so they take no place of a leaving token.
        leaving = torch.sort(fit_T.masked_fill(~leaves_T, lowest), descending=True, stable=True).indices
        goes_T[leaving[:most_leaving]] = True
        selected_T = torch.where(leaves_T & ~goes_T, near_TE[:, 0], best_T)
        open_TE.scatter_(1, selected_T[:, None], lowest)
        selections.append(selected_T)
    return torch.stack(selections, dim=1)
