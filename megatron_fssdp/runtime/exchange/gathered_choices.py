"""Selects which tokens of a replicated expert go to which of its holders, so that copies coincide.

A dispatch says how many of a source's tokens each holder of an expert gets, but not which ones. A token of a
replicated expert therefore goes, where possible, to a device to which another of its experts sends it anyway,
or at least to such a node. Each holder still gets as many tokens as the dispatch says.

Shape letters: A rows that a rank sends before they are deduplicated (pairs of token and selected expert), T
tokens, E experts, D devices.
"""

import torch
from torch import Tensor


def gathered_devices(
    token_A: Tensor, expert_A: Tensor, device_A: Tensor, node_D: Tensor, num_tokens: int, num_experts: int
) -> Tensor:
    """Devices of all pairs after tokens of the same expert have exchanged their devices.

    Tokens whose experts all have several holders keep the order of tokens: tokens with low numbers go to the
    holders with low numbers. Such tokens of different experts then often coincide, too.

    Args:
        token_A: Token of each pair, int64 ``[A]``; ascending among the pairs of an expert.
        expert_A: Expert of each pair, int64 ``[A]``.
        device_A: Device that the dispatch gives to each pair, int64 ``[A]``. Pairs with a negative device are
            left out.
        node_D: Node of each device, int64 ``[D]``.
        num_tokens: Number of tokens, T.
        num_experts: Number of experts, E.

    Returns:
        int64 ``[A]``. Every expert has as many pairs on every device as before.
    """
    num_devices = len(node_D)
    is_pair = device_A >= 0
    spare = num_experts * num_devices  # Pairs that are left out count here.
    place_A = torch.where(is_pair, expert_A * num_devices + device_A, spare)
    quota = torch.zeros(spare + 1, dtype=torch.int64, device=device_A.device)
    quota.scatter_add_(0, place_A, is_pair.long())
    has_ED = quota[:spare].view(num_experts, num_devices) > 0
    is_fixed = is_pair & (has_ED.sum(dim=1)[expert_A] == 1)
    preferred_A = _preferred(token_A, device_A, is_fixed, has_ED[expert_A], node_D, num_tokens)
    # Pairs that prefer a device get it in the order of their tokens, until the device has its number.
    wish_A = torch.where(is_pair & (preferred_A >= 0), expert_A * num_devices + preferred_A, spare)
    order = torch.argsort(wish_A, stable=True)
    sorted_wish = wish_A[order]
    turn = torch.arange(len(order), device=order.device) - torch.searchsorted(sorted_wish, sorted_wish)
    quota[spare] = 0
    gets = torch.empty_like(is_pair).scatter_(0, order, turn < quota[sorted_wish])
    # All other pairs of an expert take what is left of its devices, both in ascending order.
    left = quota - torch.zeros_like(quota).scatter_add_(0, wish_A, gets.long())
    rest = torch.argsort(torch.where(is_pair & ~gets, expert_A, num_experts), stable=True)
    position = torch.arange(len(order), device=order.device)
    left_place = torch.searchsorted(left[:spare].cumsum(0), position, right=True)
    rest_device = torch.where(left_place < spare, left_place % num_devices, -1)
    taken = torch.empty_like(device_A).scatter_(0, rest, rest_device)
    return torch.where(is_pair, torch.where(gets, preferred_A, taken), device_A)


def _preferred(
    token_A: Tensor,
    device_A: Tensor,
    is_fixed: Tensor,
    has_AD: Tensor,
    node_D: Tensor,
    num_tokens: int,
) -> Tensor:
    """Holder of each pair's expert to whose device, or else node, the token goes anyway; -1 if none.

    Args:
        token_A: Token of each pair, ``[A]``.
        device_A: Device of each pair, ``[A]``.
        is_fixed: Whether a pair's expert has only one holder, bool ``[A]``.
        has_AD: Whether a device may compute a pair, bool ``[A, D]``.
        node_D: Node of each device, ``[D]``.
        num_tokens: Number of tokens, T.
    """
    num_devices = len(node_D)
    goes = torch.zeros(num_tokens, num_devices + 1, dtype=torch.bool, device=token_A.device)
    # Pairs that are not fixed write to the last column, which is then cut off.
    column_A = torch.where(is_fixed, device_A, num_devices)
    goes.view(-1).scatter_(0, token_A * (num_devices + 1) + column_A, True)
    goes_TD = goes[:, :num_devices]
    same_DD = node_D.unsqueeze(0) == node_D.unsqueeze(1)
    near_TD = (goes_TD.float() @ same_DD.float()) > 0
    score_AD = has_AD * (1 + near_TD[token_A].int() + goes_TD[token_A].int())
    best, preferred = score_AD.max(dim=1)
    return torch.where(best > 1, preferred, -1)
