# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Exact shares in two kernels of Triton: which tokens of its expert each slot gets in this micro-batch.

Replicas are fixed; which holder of an expert computes which of its tokens is still open. The host waits for
nothing. The rule and its constants are those by which planners price exact dispatch (``token_dispatch.py``):

1. *Level.* Every holder of an expert gets a part of its tokens in proportion to ``prior * weight`` of the
   device. The prior is even dispatch, nearest holders first. Rounds lower the weights of devices above the
   mean load and raise the others.
2. *Round* to whole tokens along the holders of each expert.
3. *Fill* each holder's quota with the nearest tokens: its own, then those of its node, then others. Tokens
   and quotas are laid out along lines, as in ``planning/dispatch/whole_tokens.py``.
4. *Fall back* to even dispatch in the whole layer if its highest device load is hardly higher: its tokens
   travel less. The highest load is therefore never above that of even dispatch.

Every source computes the same quotas and derives its own part. Sources that round differently still route
validly; only the loads differ a little from those that were planned. All numbers are float64, in which whole
numbers of tokens are exact.

A program has a block of experts. Only levelling and fall-back depend on all experts: each program of the
second kernel computes both itself, with the same bits, because a launch for every round would take longer.
Devices are in places: those of each node in line, and the nodes padded to one size.

Shape letters: D devices, E experts, W slots of all devices, N nodes, G devices of the largest node, P places,
B experts of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fssdp.planning.dispatch.token_dispatch import ANY_HOLDER, ENOUGH, EXPONENTS, LEAST_LOAD

_ELEMENTS = 1024  # of a [P, B] matrix, however many places there are: eight warps have registers for them
_LAST_END = tl.constexpr(2**31 - 1)  # the end of the interval of an expert's last slot
_ANY_HOLDER, _ENOUGH, _LEAST_LOAD = tl.constexpr(ANY_HOLDER), tl.constexpr(ENOUGH), tl.constexpr(LEAST_LOAD)
_ROUNDS = tl.constexpr(len(EXPONENTS))  # with the exponents 3 and 1 in turn
# Parts of a token. Whole numbers of them are added up, so 0 stays 0 in whatever order a device adds.
_PARTS = tl.constexpr(2.0**20)
_WHOLE = tl.constexpr(1.5 * 2.0**52)  # A sum with it is rounded to a whole number, halves to even ones.


def intervals_W2(
    counts_DE: Tensor, source: int, expert_W: Tensor, slot_DE: Tensor, device_NG: Tensor
) -> Tensor:
    """Which tokens of its expert each slot gets from this source: those above a number, up to another one.

    int32 ``[W, 2]``; tokens count from 1. The last slot of an expert also gets tokens that were not counted.
    ``slot_DE``, int64, is -1 where a device lacks an expert, and ``device_NG`` has the devices of each node,
    in ascending order; both of its sizes are powers of two, padded by -1.
    """
    (num_devices, num_experts), (nodes, per_node) = counts_DE.shape, device_NG.shape
    most = triton.next_power_of_2(num_experts)
    block = min(max(_ELEMENTS // (nodes * per_node), 1), most)
    num_blocks = triton.cdiv(num_experts, block)
    interval_W2 = counts_DE.new_empty((len(expert_W), 2), dtype=torch.int32)
    # Priors [D, E], the tokens of each expert, and the loads of even dispatch and the tokens of each block.
    kept = counts_DE.new_empty((num_devices + 1) * (num_experts + num_blocks), dtype=torch.float64)
    tensors, options = (counts_DE, slot_DE, device_NG, kept), {"num_warps": 8, "enable_fp_fusion": False}
    blocks = nodes * per_node, per_node, block
    _find_priors[(num_blocks,)](*tensors, *counts_DE.shape, *blocks, **options)
    more = *counts_DE.shape, source, *blocks, min(4 * block, most)
    _find_intervals[(num_blocks,)](*tensors, interval_W2, *more, **options)
    return interval_W2


@triton.jit
def _block(first, device_P, num_experts, BLOCK: tl.constexpr):
    """Experts from a first one on, which of their entries of a matrix [D, E] exist, and where those are."""
    expert = first + tl.arange(0, BLOCK)
    is_one = (device_P >= 0)[:, None] & (expert < num_experts)[None, :]
    return expert, is_one, device_P[:, None] * num_experts + expert[None, :]


@triton.jit
def _in_nodes(values_PB, PER_NODE: tl.constexpr):
    """Sums over earlier devices of the node, and over all devices of the node."""
    values = tl.reshape(values_PB, [values_PB.shape[0] // PER_NODE, PER_NODE, values_PB.shape[1]])
    total = tl.broadcast_to(tl.sum(values, 1)[:, None, :], values.shape)
    before = tl.reshape(tl.cumsum(values, 1), values_PB.shape) - values_PB
    return before, tl.reshape(total, values_PB.shape)


@triton.jit
def _row(values_PB, is_row_P):
    return tl.sum(tl.where(is_row_P[:, None], values_PB, 0.0), 0)[None, :]


@triton.jit
def _holders(counts_DE, slot_DE, entry, is_one, PER_NODE: tl.constexpr):
    """Tokens, slots, where experts are, whether tokens go to the node or beyond, over how many holders."""
    counts = tl.load(counts_DE + entry, is_one, 0).to(tl.float64)
    slot = tl.load(slot_DE + entry, is_one, -1)
    present = tl.where(slot >= 0, 1.0, 0.0).to(tl.float64)
    _, in_node = _in_nodes(present, PER_NODE)
    far = tl.where(in_node == 0, 1.0, 0.0).to(tl.float64)
    near = 1 - present - far
    num_chosen = present + near * in_node + far * tl.sum(present, 0)[None, :]
    return counts, slot, present, near, far, tl.maximum(num_chosen, 1)  # Padding has no holders.


@triton.jit
def _evenly(share, present, near, far, PER_NODE: tl.constexpr):
    """What each holder computes if every source sends its share to each holder that it chooses."""
    _, of_node = _in_nodes(share * near, PER_NODE)
    return (share + of_node + tl.sum(share * far, 0)[None, :]) * present


@triton.jit
def _weighted(kept, first, device_P, num_devices, num_experts, weight_P, BLOCK: tl.constexpr):
    """The priors of a block, the tokens of its experts, and the sums of their weighted priors."""
    expert, is_one, entry = _block(first, device_P, num_experts, BLOCK)
    prior = tl.load(kept + entry, is_one, 0)
    total = tl.load(kept + num_devices * num_experts + expert, expert < num_experts, 0)
    by_expert = tl.sum(prior * weight_P[:, None], 0)
    return prior, total, tl.where(by_expert > 0, by_expert, 1)


@triton.jit
def _overlap(begin, length, quota_begin, quota_length, is_source):
    """The part of the source's interval in each quota's interval."""
    source_begin = _row(begin, is_source)
    first_end = tl.minimum(source_begin + _row(length, is_source), quota_begin + quota_length)
    return tl.maximum(first_end - tl.maximum(source_begin, quota_begin), 0)


@triton.jit
def _find_priors(
    counts_DE,
    slot_DE,
    device_NG,
    out_kept,
    num_devices,
    num_experts,
    PLACES: tl.constexpr,
    PER_NODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    device = tl.load(device_NG + tl.arange(0, PLACES))
    expert, is_one, entry = _block(tl.program_id(0) * BLOCK, device, num_experts, BLOCK)
    counts, _, present, near, far, num_chosen = _holders(counts_DE, slot_DE, entry, is_one, PER_NODE)
    share, total = counts / num_chosen, tl.sum(counts, 0)
    any_holder = present * _ANY_HOLDER / tl.maximum(tl.sum(present, 0), 1)[None, :]
    prior = _evenly(share, present, near, far, PER_NODE) + any_holder * (total + 1)[None, :]
    least_P = tl.sum(_evenly(tl.floor(share), present, near, far, PER_NODE), 1)
    tl.store(out_kept + entry, prior, is_one)
    tl.store(out_kept + num_devices * num_experts + expert, total, expert < num_experts)
    out_row = out_kept + (num_devices + 1) * (num_experts + tl.program_id(0))
    tl.store(out_row + device, least_P, device >= 0)
    tl.store(out_row + num_devices, tl.sum(total, 0))


@triton.jit(do_not_specialize=["source"])
def _find_intervals(
    counts_DE,
    slot_DE,
    device_NG,
    kept,
    out_interval_W2,
    num_devices,
    num_experts,
    source,
    PLACES: tl.constexpr,
    PER_NODE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND_BLOCK: tl.constexpr,  # of the rounds, which need few registers
):
    place = tl.arange(0, PLACES)
    device = tl.load(device_NG + place)
    is_source = device == source
    in_node_of_source = place // PER_NODE == tl.sum(tl.where(is_source, place // PER_NODE, 0), 0)
    least_P = tl.zeros([PLACES], tl.float64)
    sum_of_all = tl.zeros([1], tl.float64)
    for block in range(tl.num_programs(0)):
        row = kept + (num_devices + 1) * (num_experts + block)
        least_P += tl.load(row + device, device >= 0, 0)
        sum_of_all += tl.load(row + num_devices)
    mean_load = tl.maximum(sum_of_all, 1) / num_devices
    weight_P = tl.full([PLACES], 1.0, tl.float64)
    for turn in range(_ROUNDS):
        per_weight_P = tl.full([PLACES], _LEAST_LOAD, tl.float64)
        for first in range(0, num_experts, ROUND_BLOCK):
            prior, total, by_expert = _weighted(
                kept, first, device, num_devices, num_experts, weight_P, ROUND_BLOCK
            )
            per_weight_P += tl.sum(prior * (total / mean_load / by_expert)[None, :], 1)
        ratio = per_weight_P * weight_P
        weight_P = tl.where(turn % 2 == 0, weight_P / (ratio * ratio * ratio), 1 / per_weight_P)
    mine = tl.program_id(0) * BLOCK
    quota = tl.zeros([PLACES, BLOCK], tl.float64)  # of this program's experts
    quota_P = tl.zeros([PLACES], tl.float64)
    for first in range(0, num_experts, BLOCK):
        prior, total, by_expert = _weighted(kept, first, device, num_devices, num_experts, weight_P, BLOCK)
        parts = tl.floor(prior * (weight_P[:, None] * (total / by_expert)[None, :]) * _PARTS)
        until = tl.cumsum(parts, 0)
        rounded = (until / _PARTS + _WHOLE) - ((until - parts) / _PARTS + _WHOLE)
        quota_P += tl.sum(rounded, 1)
        quota = tl.where(first == mine, rounded, quota)
    pays = tl.max(quota_P, 0) * _ENOUGH < tl.max(least_P, 0)
    expert, is_one, entry = _block(mine, device, num_experts, BLOCK)
    counts, slot, present, near, far, num_chosen = _holders(counts_DE, slot_DE, entry, is_one, PER_NODE)
    # Even dispatch (Hecate, §4.4): the whole shares, and one token more for holders whose turn comes.
    choices = _row(num_chosen, is_source)
    whole = tl.floor(_row(counts, is_source) / choices)
    rest = _row(counts, is_source) - whole * choices
    is_chosen = in_node_of_source[:, None] & (_row(near, is_source) > 0) | (_row(far, is_source) > 0)
    chosen, cycle = tl.where(is_chosen | is_source[:, None], present, 0.0), choices.to(tl.int32)
    order = (tl.cumsum(chosen, 0) - chosen).to(tl.int32) - source - expert[None, :]
    is_turn = (order % cycle + cycle) % cycle < rest
    evenly = tl.where(chosen > 0, whole + tl.where(is_turn, 1.0, 0.0), 0.0)
    # Each quota gets the nearest tokens: its own, those of its node, others.
    own = tl.minimum(counts, quota)
    left, quota_left = counts - own, quota - own
    begin, of_node = _in_nodes(left, PER_NODE)
    quota_begin, quota_of_node = _in_nodes(quota_left, PER_NODE)
    shared = tl.minimum(of_node, quota_of_node)  # as far as both lines of a node reach
    close = tl.minimum(tl.maximum(shared - begin, 0), left)
    quota_close = tl.minimum(tl.maximum(shared - quota_begin, 0), quota_left)
    away, quota_away = left - close, quota_left - quota_close
    away_begin, quota_away_begin = tl.cumsum(away, 0) - away, tl.cumsum(quota_away, 0) - quota_away
    from_node = _overlap(begin, close, quota_begin, quota_close, is_source)
    from_away = _overlap(away_begin, away, quota_away_begin, quota_away, is_source)
    filled = tl.where(in_node_of_source[:, None], from_node, 0.0) + from_away
    filled += tl.where(is_source[:, None], own, 0.0)
    sent = tl.where(pays, filled, evenly)
    until = tl.cumsum(sent, 0)
    last = tl.max(tl.where(slot >= 0, place[:, None], -1), 0)
    end = tl.where(place[:, None] == last[None, :], _LAST_END, until.to(tl.int32))
    tl.store(out_interval_W2 + 2 * slot, (until - sent).to(tl.int32), slot >= 0)
    tl.store(out_interval_W2 + 2 * slot + 1, end, slot >= 0)
