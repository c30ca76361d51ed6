# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The remap in Triton, for CUDA: what ``reference.py`` computes, in few kernels.

A program of ``_route`` has a tile of tokens and one of slots. It numbers the tokens of the slot's expert and
keeps those of the slot. So each entry of the results is written once, and nothing has to be zeroed before.
No kernel depends on values that the host would have to know, so CUDA graphs may contain all of them.

Shape letters: T tokens, E experts, W slots of all devices, J rows of a share table, N tiles of tokens.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_OPTIONS = {"enable_fp_fusion": False}  # Triton asks for a decision.
_TILE = tl.constexpr(64)  # tokens of a program
_WIDTH = tl.constexpr(32)  # Experts or slots of a program; with more, registers do not suffice.


def remap(
    routing_map: Tensor, probs: Tensor, expert_W: Tensor, known: Any, counts_W: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Turn the map, bool, and the probabilities of experts ``[T, E]`` into those of slots ``[T, W]``.

    ``expert_W``, int64, has the expert of each slot, -1 without one. ``known`` is a share table, int64
    ``[E, J]``, or gives intervals ``[W, 2]`` if it gets a function that counts the tokens of each expert,
    int64 ``[E]``. Tokens are added to ``counts_W``, int32.
    """
    with torch.cuda.device_of(routing_map):
        routing_map, grid = routing_map.contiguous(), _grid(*routing_map.shape)
        counts_NE = torch.empty((grid[0], routing_map.shape[1]), dtype=torch.int64, device=routing_map.device)
        _count_tokens[grid](routing_map.view(torch.uint8), counts_NE, *routing_map.shape, **_OPTIONS)
        num_rows = known.shape[1] if isinstance(known, Tensor) else 0
        known = known if isinstance(known, Tensor) else known(partial(counts_NE.sum, 0))
        return _Routed.apply(probs, routing_map, counts_NE, expert_W, known, num_rows, counts_W)


def _grid(num_tokens: int, num_columns: int) -> tuple[int, int]:
    return triton.cdiv(num_tokens, _TILE.value), triton.cdiv(num_columns, _WIDTH.value)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, probs, routing_map, counts_NE, expert_W, known, num_rows, counts_W):
        shape = len(probs), len(expert_W)
        slot_map, slot_probs = (tensor.new_empty(shape) for tensor in (routing_map, probs))
        slot_TE = torch.empty_like(routing_map, dtype=torch.int32)
        taken = routing_map.view(torch.uint8), probs.contiguous(), counts_NE, expert_W, known
        made = slot_map.view(torch.uint8), slot_probs, slot_TE, counts_W
        _route[_grid(*shape)](*taken, *made, *probs.shape, shape[1], num_rows, **_OPTIONS)
        ctx.save_for_backward(slot_TE)
        ctx.mark_non_differentiable(slot_map)
        ctx.set_materialize_grads(False)
        return slot_map, slot_probs

    @staticmethod
    @once_differentiable
    def backward(ctx, of_map, of_probs_TW):
        if of_probs_TW is None:
            return (None,) * 7
        (slot_TE,) = ctx.saved_tensors
        of_probs_TE = of_probs_TW.new_empty(slot_TE.shape)
        tensors, sizes = (of_probs_TW.contiguous(), slot_TE, of_probs_TE), slot_TE.shape
        _return_entries[_grid(*sizes)](*tensors, *sizes, of_probs_TW.shape[1], **_OPTIONS)
        return of_probs_TE, *(None,) * 6


# Numbers of tokens change. A kernel that knows that 16 divides the number of slots would read along columns.
@triton.jit(do_not_specialize=["num_tokens"])
def _count_tokens(map_TE, out_counts_NE, num_tokens, num_experts):
    tile, expert = tl.program_id(0), tl.program_id(1) * _WIDTH + tl.arange(0, _WIDTH)
    token = tile * _TILE + tl.arange(0, _TILE)
    is_one = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    held = tl.load(map_TE + token[:, None] * num_experts + expert[None, :], is_one, 0).to(tl.int32)
    tl.store(out_counts_NE + tile * num_experts + expert, tl.sum(held, 0).to(tl.int64), expert < num_experts)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _route(
    map_TE,
    probs_TE,
    counts_NE,
    expert_W,
    known,  # a share table or, without rows of a table, intervals
    out_map_TW,
    out_probs_TW,
    out_slot_TE,
    out_counts_W,
    num_tokens,
    num_experts,
    num_slots,
    num_rows: tl.constexpr,
):
    tile, slot = tl.program_id(0), tl.program_id(1) * _WIDTH + tl.arange(0, _WIDTH)
    token = tile * _TILE + tl.arange(0, _TILE)
    expert = tl.load(expert_W + slot, slot < num_slots, -1)
    is_used = expert >= 0
    before = tl.zeros([_WIDTH], tl.int64)
    for first in range(0, tile, _TILE):
        prior = first + tl.arange(0, _TILE)
        is_before = (prior < tile)[:, None] & is_used[None, :]
        before += tl.sum(tl.load(counts_NE + prior[:, None] * num_experts + expert[None, :], is_before, 0), 0)
    is_one = (token < num_tokens)[:, None] & is_used[None, :]
    entry = token[:, None].to(tl.int64) * num_experts + expert[None, :]
    held = tl.load(map_TE + entry, is_one, 0)
    number = before[None, :].to(tl.int32) + tl.cumsum(held.to(tl.int32), 0)
    if num_rows > 0:
        row = number & (num_rows - 1)
        is_here = tl.load(known + expert[None, :] * num_rows + row, is_one, -1) == slot[None, :]
    else:
        number = tl.maximum(number, 1)
        begin, end = tl.load(known + 2 * slot, is_used, 0), tl.load(known + 2 * slot + 1, is_used, 0)
        is_here = (number > begin[None, :]) & (number <= end[None, :])
    is_here = is_one & is_here
    prob = tl.load(probs_TE + entry, is_here, 0)
    result = token[:, None].to(tl.int64) * num_slots + slot[None, :]
    is_written = (token < num_tokens)[:, None] & (slot < num_slots)[None, :]
    routed = tl.where(is_here, held, 0)
    if out_counts_W is not None:
        tl.atomic_add(out_counts_W + slot, tl.sum(routed.to(tl.int32), 0), is_used, sem="relaxed")
    tl.store(out_map_TW + result, routed, is_written)
    tl.store(out_probs_TW + result, prob, is_written)
    tl.store(out_slot_TE + entry, tl.broadcast_to(slot[None, :], [_TILE, _WIDTH]), is_here)


@triton.jit(do_not_specialize=["num_tokens"])
def _return_entries(of_TW, slot_TE, out_of_TE, num_tokens, num_experts, num_slots):
    token = (tl.program_id(0) * _TILE + tl.arange(0, _TILE))[:, None].to(tl.int64)
    expert = (tl.program_id(1) * _WIDTH + tl.arange(0, _WIDTH))[None, :]
    is_one = (token < num_tokens) & (expert < num_experts)
    entry = token * num_experts + expert
    slot = tl.load(slot_TE + entry, is_one, 0)
    tl.store(out_of_TE + entry, tl.load(of_TW + token * num_slots + slot, is_one, 0), is_one)
