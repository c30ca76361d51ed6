"""Shared experts that compute while rows travel (``--moe-shared-expert-overlap``).

Megatron divides the forward pass of its shared experts into two halves. The dispatcher runs the first half
beside the dispatch and the second half beside the combine::

    messages           dispatch                      combine
    shared experts     fc1, activation               fc2, gate
    routed experts                       experts

The halves run between the start of an exchange and the wait for it, in the backward pass as well
(``collectives/rows/two_node_exchange.py``). On CUDA, messages have NCCL's stream, and nothing else is on the
current stream between these two points. The halves therefore compute on the current stream. Megatron gives
them a stream of their own, because its exchange keeps the current stream waiting.
"""

import logging
import os
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)


class OverlappedSharedExperts:
    """Runs the halves of Megatron's shared experts for one forward pass after the other.

    Args:
        module: Megatron's ``SharedExpertMLP``, built with ``moe_shared_expert_overlap``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._hidden: torch.Tensor | None = None

    def begin(self, hidden: torch.Tensor) -> None:
        """Set the input of a forward pass.

        Args:
            hidden: Input of the layer, ``[sequence, batch, M]``.
        """
        self._hidden = hidden

    def first_half(self) -> None:
        """Compute up to the activation. The dispatch may be under way."""
        module, hidden = self._module, self._hidden
        self._hidden = None
        module.stream = torch.cuda.current_stream()
        module.pre_forward_comm(hidden, wait_current_stream=False)
        module.linear_fc1_forward_and_act()

    def second_half(self) -> None:
        """Compute the rest. The combine may be under way."""
        self._module.linear_fc2_forward()
        self._module.post_forward_comm()

    def output(self) -> torch.Tensor:
        """The shared experts' results, ``[sequence, batch, M]``."""
        result: torch.Tensor = self._module.get_output()
        return result


@cache
def tell_without_overlap(why: str) -> None:
    """Log once on rank 0 that shared experts compute without overlap.

    Args:
        why: Order of collectives that has no place for them.
    """
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            f"[fssdp] --moe-shared-expert-overlap: under {why}, shared experts compute before the exchange"
        )
