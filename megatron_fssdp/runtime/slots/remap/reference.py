"""From Megatron's routing of logical experts to the routing of slots, on the device.

A slot holds one expert's weights, and an expert is in one slot or in several. The remap gives every pair of
a token and an expert one of the expert's slots. All shapes are static, and the host waits for nothing. No two
entries of a token's row meet in one slot, because a slot belongs to one expert.

Tokens are numbered along rows of ``[E, T]``. Along columns of ``[T, E]`` a running sum is many times slower.

Shape letters: T tokens, E experts, J rows of a share table, W slots of all devices.
"""

from functools import partial
from typing import Any

import numpy as np
import torch


def by_number(table_JE: np.ndarray) -> np.ndarray:
    """A share table (``planning/slot_tables.py``) for :func:`remap_by_table`.

    Row ``n % J`` of ``table_JE``, int64 ``[J, E]`` with J a power of two, has the slot of each expert's n-th
    token, from 0. In the result, ``[E, J]``, the slots of an expert are in a line that begins with that of
    token J - 1.
    """
    return np.ascontiguousarray(np.roll(table_JE, 1, axis=0).T)


def sent_to(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """A tensor of the host on a device; the host does not wait for the copy."""
    if device is None or device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def remap(
    routing_map: torch.Tensor, probs: torch.Tensor, expert_W: torch.Tensor, known: Any, counts_W: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The counterpart of ``kernels.remap``, with the same arguments and results."""
    if isinstance(known, torch.Tensor):
        remapped = remap_by_table(routing_map, probs, known, len(expert_W))
    else:
        remapped = remap_by_intervals(routing_map, probs, expert_W, known(partial(torch.sum, routing_map, 0)))
    if counts_W is not None:
        counts_W.add_(remapped[0].sum(0))
    return remapped


def remap_by_table(
    routing_map: torch.Tensor, probs: torch.Tensor, table_EJ: torch.Tensor, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route to the slots that a share table names.

    The n-th token of expert e, from 1 and in the order of the rows, goes to slot ``table_EJ[e, n % J]``
    (:func:`by_number`). Routing map, bool, and probabilities are ``[T, E]``, those of the result ``[T, W]``.
    An entry of ``probs`` moves with its expert even if the map is false there.
    """
    place_ET = _number_tokens_ET(routing_map).bitwise_and_(table_EJ.shape[1] - 1)
    # Three operators read the slots along rows, the backward pass included.
    slot_TE, shape = table_EJ.gather(1, place_ET).t().contiguous(), (routing_map.shape[0], num_slots)
    slot_map = routing_map.new_zeros(shape).scatter_(1, slot_TE, routing_map)
    return slot_map, probs.new_zeros(shape).scatter(1, slot_TE, probs)


def remap_by_intervals(
    routing_map: torch.Tensor, probs: torch.Tensor, expert_W: torch.Tensor, interval_W2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route to each slot the tokens of its expert after the first number of its interval until the second.

    Empty slots have the expert -1 and an empty interval. Otherwise as :func:`remap_by_table`.
    """
    expert_W, (begin_W1, end_W1) = expert_W.clamp(min=0), interval_W2[..., None].unbind(1)
    number_WT = _number_tokens_ET(routing_map).clamp_(min=1).index_select(0, expert_W)
    is_here = ((number_WT > begin_W1) & (number_WT <= end_W1)).t()
    slot_map = routing_map.index_select(1, expert_W).logical_and_(is_here)
    return slot_map, torch.where(is_here, probs.index_select(1, expert_W), 0)


def _number_tokens_ET(routing_map: torch.Tensor) -> torch.Tensor:
    """Number each expert's tokens, from 1; other tokens repeat the number before them. int64 ``[E, T]``."""
    return routing_map.t().contiguous().cumsum(1)
