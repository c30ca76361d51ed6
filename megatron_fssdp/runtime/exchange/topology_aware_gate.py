"""FasterMoE's topology-aware gate: few tokens leave their node (FasterMoE, §4.3).

Shape letters: T tokens of this rank, E experts, K choices of a token.
"""

import torch


@torch.no_grad()
def choose_experts(
    fit_TE: torch.Tensor, num_choices: int, is_near_E: torch.Tensor, most_leaving: int
) -> torch.Tensor:
    """The experts of every token, of which only the best fitting ones may be far away.

    Choices are made one after another. Each takes a token's best expert that it has not chosen
    before; of the tokens whose best one is far, those with the highest fit go there, and the others
    choose again among near experts. Ties go to the lower expert and the lower token.

    Args:
        fit_TE: How well every expert fits every token, comparable among tokens.
        num_choices: K, at least 1.
        is_near_E: Whether an expert's owner is in this rank's node, bool.
        most_leaving: Tokens that may go far, for each of the choices.

    Returns:
        Experts by falling preference, int64 ``[T, K]``.

    Raises:
        ValueError: Fewer near experts than choices.
    """
    num_near = int(is_near_E.sum())
    if num_near < num_choices:
        raise ValueError(
            f"the topology-aware gate has {num_near} experts in this rank's node, wanted at least the "
            f"{num_choices} that a token chooses; use more experts, larger nodes, or router=stock"
        )
    lowest = torch.finfo(fit_TE.dtype).min
    is_taken_TE = torch.zeros_like(fit_TE, dtype=torch.bool)
    choices = []
    for _ in range(num_choices):
        open_TE = fit_TE.masked_fill(is_taken_TE, lowest)
        best_T = _first_highest(open_TE)
        leaves_T = ~is_near_E[best_T]
        fit_T = open_TE.gather(1, best_T[:, None])[:, 0].masked_fill(~leaves_T, lowest)
        stays_T = leaves_T.clone()
        # Those that do not want to leave come last, so they take nobody's place.
        stays_T[torch.sort(fit_T, descending=True, stable=True).indices[:most_leaving]] = False
        near_T = _first_highest(open_TE.masked_fill(~is_near_E, lowest))
        chosen_T = torch.where(stays_T, near_T, best_T)
        is_taken_TE[torch.arange(len(chosen_T), device=chosen_T.device), chosen_T] = True
        choices.append(chosen_T)
    return torch.stack(choices, dim=1)


def _first_highest(values_TE: torch.Tensor) -> torch.Tensor:
    """The lowest column of each row's maximum; which one ``argmax`` finds is not defined."""
    experts_E = torch.arange(values_TE.shape[1], device=values_TE.device)
    is_highest_TE = values_TE == values_TE.amax(dim=1, keepdim=True)
    return torch.where(is_highest_TE, experts_E, values_TE.shape[1]).amin(dim=1)
