# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Exact shares in one kernel of Triton: which tokens of its expert each slot gets (``exact_shares.py``).

One program goes over the matrices ``[D, E]`` in blocks of experts. It levels, rounds, fills or falls back.
Devices are in places: those of each node in line, and the nodes padded to one size, a power of two.

Shape letters: D devices, E experts, W slots of all devices, N nodes, G devices of the largest node, P places,
B experts of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fssdp.planning.dispatch.token_dispatch import ANY_HOLDER, ENOUGH, EXPONENTS, LEAST_LOAD

_ELEMENTS = 1024  # of a [P, B] matrix
_LAST_END = tl.constexpr(2**31 - 1)  # the end of the interval of an expert's last slot
_ANY_HOLDER, _ENOUGH, _LEAST_LOAD = tl.constexpr(ANY_HOLDER), tl.constexpr(ENOUGH), tl.constexpr(LEAST_LOAD)
_PAIRS = tl.constexpr(len(EXPONENTS) // 2)  # of the exponents 3 and 1
_PARTS = tl.constexpr(2.0**20)  # as in exact_shares.py


def intervals_2W(
    counts_DE: Tensor, expert_W: Tensor, slot_DE: Tensor, device_NG: Tensor, source: int
) -> Tensor:
    """Which tokens of its expert each slot gets from this source: those above a number, up to another one.

    int32 ``[2, W]``; tokens count from 1. The last slot of an expert also gets tokens that were not counted.
    ``slot_DE``, int64, is -1 where a device lacks an expert, and ``device_NG`` has the devices of each node,
    padded by -1, in ascending order.
    """
    num_devices, num_experts = counts_DE.shape
    nodes, per_node = (triton.next_power_of_2(size) for size in device_NG.shape)
    interval_2W = torch.empty((2, len(expert_W)), dtype=torch.int32, device=counts_DE.device)
    # The prior, then the quotas; and the tokens of each expert.
    kept_DE = torch.empty((num_devices + 1, num_experts), dtype=torch.float64, device=counts_DE.device)
    most = triton.next_power_of_2(num_experts)
    block = min(max(_ELEMENTS // (nodes * per_node), 8), most)
    sizes = num_devices, num_experts, len(expert_W), source, *device_NG.shape
    blocks = nodes, per_node, block, min(4 * block, most)
    tensors = counts_DE, slot_DE, device_NG, kept_DE, interval_2W
    _find_intervals[(1,)](*tensors, *sizes, *blocks, num_warps=8, enable_fp_fusion=False)
    return interval_2W


@triton.jit
def _block(first, device_P, num_experts, BLOCK: tl.constexpr):
    """Experts from a first one on, which of their entries of a matrix [D, E] exist, and where those are."""
    expert = first + tl.arange(0, BLOCK)
    is_one = (device_P >= 0)[:, None] & (expert < num_experts)[None, :]
    return expert, is_one, device_P[:, None] * num_experts + expert[None, :]


@triton.jit
def _in_nodes(values_PB, NODES: tl.constexpr, PER_NODE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over earlier devices of the node, and over all devices of the node."""
    values = tl.reshape(values_PB, [NODES, PER_NODE, BLOCK])
    before = tl.reshape(tl.cumsum(values, 1), [NODES * PER_NODE, BLOCK]) - values_PB
    total = tl.broadcast_to(tl.sum(values, 1)[:, None, :], [NODES, PER_NODE, BLOCK])
    return before, tl.reshape(total, [NODES * PER_NODE, BLOCK])


@triton.jit
def _round(values):
    """To the nearest whole number, halves to even ones, as torch does."""
    whole = tl.floor(values)
    rest = values - whole
    is_odd = whole - 2 * tl.floor(whole * 0.5) > 0.5
    return whole + tl.where((rest > 0.5) | ((rest == 0.5) & is_odd), 1.0, 0.0)


@triton.jit
def _row(values_PB, is_row_P):
    return tl.sum(tl.where(is_row_P[:, None], values_PB, 0.0), 0)[None, :]


@triton.jit
def _holders(slot_DE, entry, is_one, NODES: tl.constexpr, PER_NODE: tl.constexpr, BLOCK: tl.constexpr):
    """Where experts are, whether a source's tokens go to its node or beyond, and over how many holders."""
    slot = tl.load(slot_DE + entry, is_one, -1)
    present = tl.where(slot >= 0, 1.0, 0.0).to(tl.float64)
    _, in_node = _in_nodes(present, NODES, PER_NODE, BLOCK)
    far = tl.where(in_node == 0, 1.0, 0.0).to(tl.float64)
    near = 1 - present - far
    num_chosen = present + near * in_node + far * tl.sum(present, 0)[None, :]
    # Experts and devices that do not exist divide by nothing.
    return slot, present, near, far, tl.maximum(num_chosen, 1)


@triton.jit
def _evenly(share, present, near, far, NODES: tl.constexpr, PER_NODE: tl.constexpr, BLOCK: tl.constexpr):
    """What each holder computes if every source sends its share to each holder that it chooses."""
    _, of_node = _in_nodes(share * near, NODES, PER_NODE, BLOCK)
    return (share + of_node + tl.sum(share * far, 0)[None, :]) * present


@triton.jit(do_not_specialize=["source"])
def _find_intervals(
    counts_DE,
    slot_DE,
    device_NG,
    out_kept_DE,
    out_interval_2W,
    num_devices,
    num_experts,
    num_slots,
    source,
    num_nodes,
    per_node,
    NODES: tl.constexpr,
    PER_NODE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVEL_BLOCK: tl.constexpr,  # of the rounds, which need few registers
):
    total_E = out_kept_DE + num_devices * num_experts
    place = tl.arange(0, NODES * PER_NODE)
    node, turn_in_node = place // PER_NODE, place % PER_NODE
    is_place = (node < num_nodes) & (turn_in_node < per_node)
    device = tl.load(device_NG + node * per_node + turn_in_node, is_place, -1)
    is_source = device == source
    in_node_of_source = node == tl.sum(tl.where(is_source, node, 0), 0)
    least_P = tl.zeros([NODES * PER_NODE], tl.float64)
    sum_of_all = tl.zeros([1], tl.float64)
    for first in range(0, num_experts, BLOCK):
        expert, is_one, entry = _block(first, device, num_experts, BLOCK)
        counts = tl.load(counts_DE + entry, is_one, 0).to(tl.float64)
        _, present, near, far, num_chosen = _holders(slot_DE, entry, is_one, NODES, PER_NODE, BLOCK)
        share = counts / num_chosen
        even = _evenly(share, present, near, far, NODES, PER_NODE, BLOCK)
        least_P += tl.sum(_evenly(tl.floor(share), present, near, far, NODES, PER_NODE, BLOCK), 1)
        total = tl.sum(counts, 0)
        sum_of_all += tl.sum(total, 0)
        tl.store(total_E + expert, total, expert < num_experts)
        any_holder = present * _ANY_HOLDER / tl.maximum(tl.sum(present, 0), 1)[None, :]
        tl.store(out_kept_DE + entry, even + any_holder * (total + 1)[None, :], is_one)
    tl.debug_barrier()
    mean_load = tl.maximum(sum_of_all, 1) / num_devices
    weight_P = tl.full([NODES * PER_NODE], 1.0, tl.float64)
    for turn in range(2 * _PAIRS):
        per_weight_P = tl.full([NODES * PER_NODE], 0.0, tl.float64) + _LEAST_LOAD
        for first in range(0, num_experts, LEVEL_BLOCK):
            expert, is_one, entry = _block(first, device, num_experts, LEVEL_BLOCK)
            prior = tl.load(out_kept_DE + entry, is_one, 0)
            total = tl.load(total_E + expert, expert < num_experts, 0)
            by_expert = tl.sum(prior * weight_P[:, None], 0)
            per_weight_P += tl.sum(
                prior * (total / mean_load / tl.where(by_expert > 0, by_expert, 1))[None, :], 1
            )
        ratio = per_weight_P * weight_P
        weight_P = tl.where(turn % 2 == 0, weight_P / (ratio * ratio * ratio), 1 / per_weight_P)
    quota_P = tl.zeros([NODES * PER_NODE], tl.float64)
    for first in range(0, num_experts, BLOCK):
        expert, is_one, entry = _block(first, device, num_experts, BLOCK)
        prior = tl.load(out_kept_DE + entry, is_one, 0)
        total = tl.load(total_E + expert, expert < num_experts, 0)
        by_expert = tl.sum(prior * weight_P[:, None], 0)
        part = prior * (weight_P[:, None] * (total / tl.where(by_expert > 0, by_expert, 1))[None, :])
        parts = tl.floor(part * _PARTS)
        until = tl.cumsum(parts, 0)
        quota = _round(until / _PARTS) - _round((until - parts) / _PARTS)
        quota_P += tl.sum(quota, 1)
        tl.debug_barrier()  # All threads have the prior.
        tl.store(out_kept_DE + entry, quota, is_one)
    tl.debug_barrier()
    pays = tl.max(quota_P, 0) * _ENOUGH < tl.max(least_P, 0)
    for first in range(0, num_experts, BLOCK):
        expert, is_one, entry = _block(first, device, num_experts, BLOCK)
        counts = tl.load(counts_DE + entry, is_one, 0).to(tl.float64)
        slot, present, near, far, num_chosen = _holders(slot_DE, entry, is_one, NODES, PER_NODE, BLOCK)
        # Even dispatch (Hecate, §4.4): the whole shares, and one token more for holders whose turn comes.
        choices = _row(num_chosen, is_source)
        whole = tl.floor(_row(counts, is_source) / choices)
        rest = _row(counts, is_source) - whole * choices
        is_near = in_node_of_source[:, None] & (_row(near, is_source) > 0)
        chosen = present * tl.where(is_near | (_row(far, is_source) > 0), 1.0, 0.0)
        chosen += tl.where(is_source[:, None], present, 0.0)
        order = (tl.cumsum(chosen, 0) - chosen).to(tl.int32) - source - expert[None, :]
        cycle = choices.to(tl.int32)
        order = (order % cycle + cycle) % cycle
        evenly = tl.where(chosen > 0, whole + tl.where(order < rest, 1.0, 0.0), 0.0)
        # Each quota gets the nearest tokens: its own, those of its node, others.
        quota = tl.load(out_kept_DE + entry, is_one, 0)
        own = tl.minimum(counts, quota)
        begin, of_node = _in_nodes(counts - own, NODES, PER_NODE, BLOCK)
        quota_begin, quota_of_node = _in_nodes(quota - own, NODES, PER_NODE, BLOCK)
        shared = tl.minimum(of_node, quota_of_node)  # as far as both lines of a node reach
        close = tl.minimum(tl.maximum(shared - begin, 0), counts - own)
        quota_close = tl.minimum(tl.maximum(shared - quota_begin, 0), quota - own)
        away, quota_away = counts - own - close, quota - own - quota_close
        away_begin, quota_away_begin = tl.cumsum(away, 0) - away, tl.cumsum(quota_away, 0) - quota_away
        from_node = _overlap(begin, close, quota_begin, quota_close, is_source)
        from_away = _overlap(away_begin, away, quota_away_begin, quota_away, is_source)
        filled = tl.where(in_node_of_source[:, None], from_node, 0.0) + from_away
        filled += tl.where(is_source[:, None], own, 0.0)
        sent = tl.where(pays, filled, evenly)
        until = tl.cumsum(sent, 0)
        last = tl.max(tl.where(slot >= 0, place[:, None], -1), 0)
        end = tl.where(place[:, None] == last[None, :], _LAST_END, until.to(tl.int32))
        tl.store(out_interval_2W + slot, (until - sent).to(tl.int32), slot >= 0)
        tl.store(out_interval_2W + num_slots + slot, end, slot >= 0)


@triton.jit
def _overlap(begin, length, quota_begin, quota_length, is_source):
    """The part of the source's interval in each quota's interval."""
    source_begin, source_length = _row(begin, is_source), _row(length, is_source)
    last_begin = tl.maximum(source_begin, quota_begin)
    first_end = tl.minimum(source_begin + source_length, quota_begin + quota_length)
    return tl.maximum(first_end - last_begin, 0)
