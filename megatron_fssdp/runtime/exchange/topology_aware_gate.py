"""FasterMoE's topology-aware gate, which limits how many tokens leave their node (FasterMoE, §4.3).

Shape letters: T tokens, E experts, K choices per token.
"""

import torch


@torch.no_grad()
def select_experts(
    fit_TE: torch.Tensor, top_k: int, is_near_E: torch.Tensor, most_leaving: int
) -> torch.Tensor:
    """Select the experts of every token so that only few tokens leave the node.

    The K experts of a token are selected one after another. In each selection, a token takes the best expert
    that it has not selected before. Among the tokens whose best expert is in another node, the
    ``most_leaving`` tokens with the highest fit keep it. The others take the best expert of this rank's node
    that they have not selected. Ties go to the lower expert and the lower token.

    Args:
        fit_TE: How well every expert fits every token, ``[T, E]``; comparable between tokens.
        top_k: Number of experts that a token selects, K, at least 1.
        is_near_E: Whether an expert's owner is in this rank's node, bool ``[E]``.
        most_leaving: Most tokens that may leave the node, for each of the K selections.

    Returns:
        Experts of each token in the order of selection, int64 ``[T, K]``.

    Raises:
        ValueError: This rank's node has fewer than K experts.
    """
    num_near = int(is_near_E.sum())
    if num_near < top_k:
        raise ValueError(
            f"the topology-aware gate has {num_near} experts in this rank's node, wanted at least the "
            f"{top_k} that a token selects; use more experts, larger nodes, or router=stock"
        )
    lowest = torch.finfo(fit_TE.dtype).min
    is_taken_TE = torch.zeros_like(fit_TE, dtype=torch.bool)
    selections = []
    for _ in range(top_k):
        open_TE = fit_TE.masked_fill(is_taken_TE, lowest)
        best_T = _first_highest(open_TE)
        leaves_T = ~is_near_E[best_T]
        fit_T = open_TE.gather(1, best_T[:, None])[:, 0].masked_fill(~leaves_T, lowest)
        stays_T = leaves_T.clone()
        # Tokens whose best expert is near are last in this order, so they take no place of a leaving token.
        stays_T[torch.sort(fit_T, descending=True, stable=True).indices[:most_leaving]] = False
        near_T = _first_highest(open_TE.masked_fill(~is_near_E, lowest))
        selected_T = torch.where(stays_T, near_T, best_T)
        is_taken_TE[torch.arange(len(selected_T), device=selected_T.device), selected_T] = True
        selections.append(selected_T)
    return torch.stack(selections, dim=1)


def _first_highest(values_TE: torch.Tensor) -> torch.Tensor:
    """The lowest column that has each row's maximum, int64 ``[T]``.

    ``argmax`` does not define which column it returns if several have the maximum.
    """
    experts_E = torch.arange(values_TE.shape[1], device=values_TE.device)
    is_highest_TE = values_TE == values_TE.amax(dim=1, keepdim=True)
    return torch.where(is_highest_TE, experts_E, values_TE.shape[1]).amin(dim=1)
