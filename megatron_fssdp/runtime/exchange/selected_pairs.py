"""The order in which a rank sends its rows, prepared before the host knows how many rows go where.

A row is one pair of a token and an expert that the token selected. The order by expert and token follows from
the routing map alone, so the device can compute it while the counts travel to the host. With the counts, the
host moves whole chunks of this order to their places (:mod:`chunk_permutation`)::

    before the counts are known    (expert 0: tokens 1 4 5) (expert 1: tokens 0 1) ...   by expert, token
    after                          device 0: (0: 1) (1: 0 1)    device 1: (0: 4 5) ...   by device, expert,
    token

Shape letters: T tokens of this rank, E experts, A rows that a rank sends, P pairs of expert and device.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megatron_fssdp.runtime.exchange.chunk_permutation import chunk_permutation


@dataclass(frozen=True, eq=False)
class SelectedPairs:
    """The pairs of token and selected expert of one micro-batch on this rank, by expert and then token.

    Attributes:
        token_and_assignment: Token of each pair, and its index in the flattened ``[T, E]`` routing map, int64
            ``[2, room]``. Entries after the last pair have no meaning. On CUDA, there is room for
            ``most_pairs``.
        ones: Ones from which the order of sending is computed, int64 ``[room]``.
        num_tokens: Number of tokens of this rank, T.
    """

    token_and_assignment: torch.Tensor
    ones: torch.Tensor
    num_tokens: int

    @classmethod
    def of(cls, routing_map: torch.Tensor, most_pairs: int | None = None) -> "SelectedPairs":
        """Queue the computation of the pairs; the host does not wait.

        Args:
            routing_map: Experts that each token of this rank selected, bool ``[T, E]``.
            most_pairs: Largest number of pairs that the map can have; ``None`` if the caller does not know
                it.
        """
        num_tokens, num_experts = routing_map.shape
        size = routing_map.numel() if most_pairs is None else min(most_pairs, routing_map.numel())
        position = true_positions(routing_map.t().reshape(-1), size)
        expert = torch.div(position, max(num_tokens, 1), rounding_mode="floor")
        token = position.sub(expert, alpha=num_tokens)
        return cls(
            torch.stack([token, expert.add(token, alpha=num_experts)]), torch.ones_like(token), num_tokens
        )

    def to_send(self, sizes_P: np.ndarray, order_P: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The pairs in the order of sending: by device, then expert, then token.

        Args:
            sizes_P: Number of pairs of each chunk, int64 ``[P]``. A chunk is what one device gets of one
                expert. Chunks are ordered by expert, then device: the first device gets the first tokens of
                an expert, the next device the following ones, and so on.
            order_P: Positions of the chunks, sorted by device, then expert; int64 ``[P]``.

        Returns:
            Token of each row, and its index in the flattened ``[T, E]`` routing map, int64 ``[A]`` each.

        Raises:
            RuntimeError: There are more pairs than ``most_pairs``.
        """
        num_rows, room = int(sizes_P.sum()), len(self.ones)
        if num_rows > room:
            raise RuntimeError(
                f"got {num_rows} pairs of tokens and experts, wanted at most {room}; tell the layer the "
                "largest number of experts that a token can select, or None"
            )
        index = chunk_permutation(sizes_P, order_P, self.ones.device, ones=self.ones)
        pairs = self.token_and_assignment
        pairs = pairs[:, :num_rows] if index is None else pairs.gather(1, index.expand(2, -1))
        return pairs[0], pairs[1]

    def note_current_stream(self) -> None:
        """Let the current CUDA stream finish its use of the pairs before their memory is used again."""
        for tensor in (self.token_and_assignment, self.ones):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream())


def true_positions(mask: torch.Tensor, size: int) -> torch.Tensor:
    """Positions at which a mask is true, ascending; the host does not wait for the device.

    ``torch.nonzero_static`` does the same, but torch 2.6 does not have it on CUDA, and some later releases
    crash on a rank without tokens.

    Args:
        mask: One-dimensional bool tensor of any length.
        size: Largest number of positions to return.

    Returns:
        Positions of the first ``size`` true entries, int64. On CUDA, the length is always ``size``, and zeros
        follow if there are fewer true entries.
    """
    if mask.device.type == "cpu":
        return mask.nonzero().view(-1)[:size]  # It knows the number, and is many times faster on the CPU.
    # All other entries write to one extra position at the end, which is then cut off.
    slots = torch.where(mask, mask.cumsum(0) - 1, size)
    if size < mask.numel():
        slots.clamp_(max=size)
    positions = torch.arange(mask.numel(), device=mask.device)
    return positions.new_zeros(size + 1).scatter_(0, slots, positions)[:size]
