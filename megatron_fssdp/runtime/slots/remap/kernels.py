# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The remap in Triton, for CUDA: what ``reference.py`` and ``exact_shares.py`` compute, in few kernels.

    count_tokens      tokens of each expert in each tile of rows
    find_intervals    exact shares only: which tokens of its expert each slot gets (``interval_kernel.py``)
    route             the map and the probabilities of the slots, and where each entry went
    return_entries    backward: the gradients of the probabilities

A program of ``route`` has one tile of tokens and one of slots. It numbers the tokens of the slot's expert and
keeps those of the slot. So each entry of the results is written once, and nothing has to be zeroed before.
No kernel depends on values that the host would have to know, so CUDA graphs may contain all of them.

Shape letters: T tokens, E experts, D devices, W slots of all devices, J rows of a share table, N tiles of
tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fssdp.runtime.slots.remap.interval_kernel import intervals_2W

_OPTIONS = {"enable_fp_fusion": False}  # Triton asks for a decision.
_TILE = 64  # tokens of a program
_WIDTH = 32  # Experts or slots of a program; with more, registers do not suffice.


def remap_by_table(
    routing_map: Tensor, probs: Tensor, table_EJ: Tensor, expert_W: Tensor, counts_W: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`reference.remap_by_table`; the tokens of each slot are added to ``counts_W``, int32.

    ``expert_W``, int64, has the expert of each slot, -1 without one.
    """
    routing_map = routing_map.contiguous()
    return _Routed.apply(probs, routing_map, tokens_by_tile(routing_map), expert_W, table_EJ, None, counts_W)


def remap_exactly(
    routing_map: Tensor,
    probs: Tensor,
    gathered: Callable[[Tensor], Tensor],
    expert_W: Tensor,
    slot_DE: Tensor,
    device_NG: Tensor,
    source: int,
    counts_W: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """:func:`exact_shares.remap_exactly`.

    ``gathered`` brings together the counts, int64 ``[E]``, of all devices: ``[D, E]``. The other arguments
    are those of :func:`intervals_2W`.
    """
    routing_map = routing_map.contiguous()
    counts_NE = tokens_by_tile(routing_map)
    interval_2W = intervals_2W(gathered(counts_NE.sum(0)), expert_W, slot_DE, device_NG, source)
    return _Routed.apply(probs, routing_map, counts_NE, expert_W, None, interval_2W, counts_W)


def tokens_by_tile(routing_map: Tensor) -> Tensor:
    """Tokens of each expert in each tile of a contiguous map, int64 ``[N, E]``."""
    num_tokens, num_experts = routing_map.shape
    tiles = triton.cdiv(num_tokens, _TILE)
    counts_NE = torch.empty((tiles, num_experts), dtype=torch.int64, device=routing_map.device)
    if tiles:
        grid = tiles, triton.cdiv(num_experts, _WIDTH)
        _count_tokens[grid](
            routing_map.view(torch.uint8), counts_NE, num_tokens, num_experts, _TILE, _WIDTH, **_OPTIONS
        )
    return counts_NE


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        probs: Tensor,
        routing_map: Tensor,
        counts_NE: Tensor,
        expert_W: Tensor,
        table_EJ: Tensor | None,
        interval_2W: Tensor | None,
        counts_W: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        (num_tokens, num_experts), num_slots = routing_map.shape, len(expert_W)
        slot_map, slot_probs = (one.new_empty((num_tokens, num_slots)) for one in (routing_map, probs))
        slot_TE = torch.empty((num_tokens, num_experts), dtype=torch.int32, device=probs.device)
        known, num_rows = (table_EJ, table_EJ.shape[1]) if table_EJ is not None else (interval_2W, 0)
        if num_tokens:
            grid = triton.cdiv(num_tokens, _TILE), triton.cdiv(num_slots, _WIDTH)
            _route[grid](
                *(routing_map.view(torch.uint8), probs.contiguous(), counts_NE, expert_W, known),
                *(slot_map.view(torch.uint8), slot_probs, slot_TE, counts_W),
                *(num_tokens, num_experts, num_slots, num_rows, counts_W is not None, _TILE, _WIDTH),
                **_OPTIONS,
            )
        ctx.save_for_backward(slot_TE)
        ctx.mark_non_differentiable(slot_map)
        ctx.set_materialize_grads(False)
        return slot_map, slot_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_map: Any, of_probs_TW: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_probs_TW is None:
            return (None,) * 7
        (slot_TE,) = ctx.saved_tensors
        (num_tokens, num_experts), num_slots = slot_TE.shape, of_probs_TW.shape[1]
        of_probs_TE = of_probs_TW.new_empty(slot_TE.shape)
        if num_tokens:
            grid = triton.cdiv(num_tokens, _TILE), triton.cdiv(num_experts, _WIDTH)
            sizes = num_tokens, num_experts, num_slots, _TILE, _WIDTH
            _return_entries[grid](of_probs_TW.contiguous(), slot_TE, of_probs_TE, *sizes, **_OPTIONS)
        return of_probs_TE, None, None, None, None, None, None


# Numbers of tokens change. A kernel that knows that 16 divides the number of slots would read along columns.
@triton.jit(do_not_specialize=["num_tokens"])
def _count_tokens(map_TE, out_counts_NE, num_tokens, num_experts, TILE: tl.constexpr, WIDTH: tl.constexpr):
    tile, expert = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    token = tile * TILE + tl.arange(0, TILE)
    is_one = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    held = tl.load(map_TE + token[:, None] * num_experts + expert[None, :], is_one, 0).to(tl.int32)
    tl.store(out_counts_NE + tile * num_experts + expert, tl.sum(held, 0).to(tl.int64), expert < num_experts)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _route(
    map_TE,
    probs_TE,
    counts_NE,
    expert_W,
    known,
    out_map_TW,
    out_probs_TW,
    out_slot_TE,
    out_counts_W,
    num_tokens,
    num_experts,
    num_slots,
    num_rows: tl.constexpr,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tile, slot = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    token = tile * TILE + tl.arange(0, TILE)
    expert = tl.load(expert_W + slot, slot < num_slots, -1)
    is_used = expert >= 0
    before = tl.zeros([WIDTH], tl.int64)
    for first in range(0, tile, TILE):
        other = first + tl.arange(0, TILE)
        is_before = (other < tile)[:, None] & is_used[None, :]
        before += tl.sum(tl.load(counts_NE + other[:, None] * num_experts + expert[None, :], is_before, 0), 0)
    is_one = (token < num_tokens)[:, None] & is_used[None, :]
    entry = token[:, None].to(tl.int64) * num_experts + expert[None, :]
    held = tl.load(map_TE + entry, is_one, 0)
    number = before[None, :].to(tl.int32) + tl.cumsum(held.to(tl.int32), 0)
    if num_rows > 0:  # a share table
        row = number & (num_rows - 1)
        found = tl.load(known + expert[None, :] * num_rows + row, is_one, -1)
        is_here = is_one & (found == slot[None, :])
    else:  # intervals
        number = tl.maximum(number, 1)
        begin, end = tl.load(known + slot, is_used, 0), tl.load(known + num_slots + slot, is_used, 0)
        is_here = is_one & (number > begin[None, :]) & (number <= end[None, :])
    prob = tl.load(probs_TE + entry, is_here, 0)
    result = token[:, None].to(tl.int64) * num_slots + slot[None, :]
    is_written = (token < num_tokens)[:, None] & (slot < num_slots)[None, :]
    routed = tl.where(is_here, held, 0)
    if COUNTS:
        tl.atomic_add(out_counts_W + slot, tl.sum(routed.to(tl.int32), 0), is_used, sem="relaxed")
    tl.store(out_map_TW + result, routed, is_written)
    tl.store(out_probs_TW + result, prob, is_written)
    tl.store(out_slot_TE + entry, tl.broadcast_to(slot[None, :], [TILE, WIDTH]), is_here)


@triton.jit(do_not_specialize=["num_tokens"])
def _return_entries(
    of_TW, slot_TE, out_of_TE, num_tokens, num_experts, num_slots, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE))[:, None].to(tl.int64)
    expert = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    is_one = (token < num_tokens) & (expert < num_experts)
    slot = tl.load(slot_TE + token * num_experts + expert, is_one, 0)
    tl.store(
        out_of_TE + token * num_experts + expert, tl.load(of_TW + token * num_slots + slot, is_one, 0), is_one
    )
