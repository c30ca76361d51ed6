"""The second form of the remap: shares from the counts of the present micro-batch, computed on the device.

Replicas are fixed; which holder of an expert computes which of its tokens is still open. Shapes and the
number of operations are fixed, and the host waits for nothing:

1. *Level.* Every holder of an expert gets a part of its tokens in proportion to ``prior * weight`` of the
   device. The prior is even dispatch, nearest holders first. Rounds lower the weights of devices above the
   mean load and raise the others.
2. *Round* to whole tokens along the holders of each expert.
3. *Fill* each holder's quota with the nearest tokens: its own, then those of its node, then others. Tokens
   and quotas are laid out along lines, as in ``planning/dispatch/token_dispatch.py``.
4. *Fall back* to even dispatch in the whole layer if its highest device load is hardly higher: its tokens
   travel less. The highest load is therefore never above that of even dispatch.

Every source computes the same quotas and derives its own part: where each holder's interval of the source's
tokens ends. Ends are exact to one token. A share table, exact to 1/R, would spare the binary search, but
would have to be sorted on the device. Sources that round differently, such as CPU and CUDA, still route
validly; only the loads differ a little from those that were planned.

The matrices are small, so the number of operators is what costs time. Sums along devices are therefore
products with constant matrices of zeros and ones, and two quantities that are treated alike stand side by
side, ``[D, 2E]``. All numbers are float64, in which whole numbers of tokens are exact. The rule and its
constants are those by which planners price exact dispatch (``token_dispatch.py``).

Shape letters: T tokens, E experts, D devices, N nodes, P pairs of expert and device, W slots of all devices.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fssdp.planning.dispatch.token_dispatch import ANY_HOLDER, ENOUGH, EXPONENTS, LEAST_LOAD
from megatron_fssdp.runtime.slots.remap.reference import number_tokens_ET, route_to, sent_to

_PARTS = 2.0**20  # of a token, while parts are added up


@dataclass(frozen=True, eq=False)
class Holders:
    """A plan as the exact shares of one source see it. Made once for each plan. Float64 but for the slots."""

    source: int  # number of this device
    slot_ED: Tensor  # a slot of each expert for each device: the device's, if it has one; int64
    present: Tensor  # 1 where a device holds an expert, [D, E]
    num_chosen: Tensor  # over how many holders even dispatch splits a source's tokens, [D, E]
    # Turn of each holder when even dispatch deals out this source's remainders, from 0; D for devices that
    # get none of the source's tokens. [D, E]
    turn: Tensor
    any_holder: Tensor  # part of the prior that each holder gets in any case, [D, E]
    # 1 where a source lacks an expert and its node has it, then where its node lacks it.
    is_away: Tensor  # [2, D, 1, E]
    from_away: Tensor  # which devices get what comes from their node, then from other nodes, [D, 2D]
    lines: Tensor  # sums over earlier devices of a node, then over all devices of the node, [2D, D]
    earlier: Tensor  # sums over all earlier devices, [D, D]
    until: Tensor  # sums that include the device itself, [D, D]
    difference: Tensor  # from the device before, [D, D]
    reaches: Tensor  # 1 where the source's tokens on each of both lines can go, [2, D, 1]
    is_source: Tensor  # 1 for this device, [D, 1]

    @classmethod
    def of(cls, slot_ED: Any, node_D: Any, source: int, device: torch.device | None = None) -> "Holders":
        """Derive the tensors of one source from ``SlotTable.slot_ED`` and the nodes of the devices.

        Both are arrays of the host, which does not wait for the device.
        """
        slot_ED, node_D = np.asarray(slot_ED), np.asarray(node_D)
        num_experts, num_devices = slot_ED.shape
        # Large arrays take long to make, so there are no others than those of the result. One copy brings
        # them to the device.
        numbers = np.empty((6, num_devices, num_experts))
        present, num_chosen, turn, any_holder, near, far = numbers
        has_DE = slot_ED.T >= 0
        present[:] = has_DE
        in_node_NE = (np.arange(node_D.max() + 1)[:, None] == node_D).astype(float) @ present
        holders_E, in_node_DE = in_node_NE.sum(0), (in_node_NE > 0)[node_D]
        far[:] = ~in_node_DE
        near[:] = in_node_DE & ~has_DE
        np.take(np.where(in_node_NE > 0, in_node_NE, holders_E), node_D, 0, num_chosen, "clip")
        num_chosen[has_DE] = 1
        np.multiply(present, ANY_HOLDER / holders_E, any_holder)
        # The holders among which this source chooses are a ring, as in even dispatch.
        chosen_ED = (has_DE & ((node_D == node_D[source])[:, None] | ~in_node_DE[source])).T
        chosen_ED[has_DE[source]] = False
        chosen_ED[has_DE[source], source] = True
        expert_P, device_P = np.nonzero(chosen_ED)
        number_E = num_chosen[source]
        first_E = np.cumsum(number_E) - number_E
        turn[:] = num_devices
        turn[device_P, expert_P] = (
            np.arange(expert_P.size) - first_E[expert_P] - source - expert_P
        ) % number_E[expert_P]
        slots = np.where(slot_ED >= 0, slot_ED, slot_ED.max(axis=1, keepdims=True))
        sent = sent_to(torch.from_numpy(numbers), device)
        is_away, lines = sent[4:].unsqueeze(2), _lines_of(tuple(node_D.tolist()), source, device)
        return cls(source, sent_to(torch.from_numpy(slots), device), *(*sent[:4], is_away, *lines))


@lru_cache(maxsize=8)  # equal for all layers
def _lines_of(nodes: tuple[int, ...], source: int, device: torch.device | None) -> tuple[Tensor, ...]:
    """The tensors of one source that no plan changes."""
    same_node = (np.array(nodes)[:, None] == nodes).astype(float)
    ones = np.ones_like(same_node)
    earlier, is_one = np.tril(ones, -1), np.eye(len(nodes))
    arrays = (
        np.hstack([same_node, ones]),
        np.vstack([same_node * earlier, same_node]),
        earlier,
        np.tril(ones),
        is_one - np.eye(len(nodes), k=-1),
        np.stack([same_node[:, [source]], ones[:, :1]]),
        is_one[:, [source]],
    )
    return tuple(sent_to(torch.from_numpy(array), device) for array in arrays)


def remap_exactly(
    routing_map: Tensor, probs: Tensor, counts_DE: Tensor, holders: Holders, num_slots: int
) -> tuple[Tensor, Tensor]:
    """Route to slots by shares of the present counts: the counterpart of ``remap_by_table``.

    The n-th token of an expert, from 1, goes to the first device whose end is at least n. Tokens above all
    ends, of which the counts did not know, go to some slot of their expert. ``counts_DE``, int64, are the
    tokens of every source for every expert; this source's row has the sums of the map's columns.
    """
    end_ED = exact_ends_ED(counts_DE, holders)
    number_ET = number_tokens_ET(routing_map).clamp_(min=1)
    place_ET = torch.searchsorted(end_ED, number_ET).clamp_(max=end_ED.shape[1] - 1)
    return route_to(holders.slot_ED.gather(1, place_ET), routing_map, probs, num_slots)


def exact_ends_ED(counts_DE: Tensor, holders: Holders) -> Tensor:
    """Where each device's interval of this source's tokens of each expert ends, int64 ``[E, D]``."""
    counts, num_experts = counts_DE.double(), counts_DE.shape[1]
    share = counts / holders.num_chosen
    whole_share = share.floor()
    # What each device computes if every source sends its share, or the whole part of it, to each holder that
    # it chooses. Even dispatch gives each holder the whole part at least.
    both = torch.cat([share, whole_share], 1)
    away = (both.view(-1, 2, num_experts) * holders.is_away).view(-1, 2 * num_experts)
    even, least = torch.addmm(both, holders.from_away, away).split(num_experts, 1)
    quota = _whole(_levelled(counts.sum(0), even * holders.present, holders), holders)
    pays = quota.sum(1).amax() * ENOUGH < (least * holders.present).sum(1).amax()
    # Even dispatch (Hecate, §4.4): the whole shares, and one token more for holders whose turn comes.
    whole = whole_share[holders.source]
    rest = torch.addcmul(counts[holders.source], whole, holders.num_chosen[holders.source], value=-1)
    evenly = (holders.turn < rest) + whole * (holders.turn < len(holders.turn))
    sent = torch.where(pays, _filled(counts, quota, holders), evenly)
    return (sent.t() @ holders.until.t()).long()


def _levelled(total_E: Tensor, even: Tensor, holders: Holders) -> Tensor:
    """Parts of the experts' tokens that level the loads of the devices, ``[D, E]``.

    The weights of the devices are all that changes, so a round is two products with a ``[D, E]`` matrix.
    """
    prior = torch.addcmul(even, holders.any_holder, total_E + 1)
    by_expert = prior.t()
    load_E = total_E / total_E.sum().clamp_(min=1).div_(len(prior))  # in mean device loads
    weight = torch.ones_like(prior[:, 0])
    least = weight * LEAST_LOAD
    for exponent in EXPONENTS:
        per_weight = torch.addmv(least, prior, load_E / by_expert.mv(weight))
        if exponent == 1:
            weight = per_weight.reciprocal_()
        else:
            weight = weight * per_weight.mul_(weight).pow_(-exponent)
    return prior * torch.outer(weight, total_E / by_expert.mv(weight))


def _whole(tokens: Tensor, holders: Holders) -> Tensor:
    """Round parts along the devices; each expert's sum, a whole number, stays. ``[D, E]``.

    Whole numbers of small parts of a token are added up, so 0 stays 0 in whatever order a device adds.
    """
    ends = holders.until @ tokens.mul_(_PARTS).floor_()
    return holders.difference @ ends.mul_(1 / _PARTS).round_()


def _filled(counts: Tensor, quota: Tensor, holders: Holders) -> Tensor:
    """Tokens that this source sends to each device if quotas get the nearest tokens, ``[D, E]``."""
    num_devices, num_experts = counts.shape
    own = torch.minimum(counts, quota)
    # Side by side: tokens that leave their source, and open quotas. Both have a line in each node.
    left = torch.cat([counts - own, quota - own], 1)
    begin, reach = (holders.lines @ left).view(2, num_devices, 2, num_experts)
    shared = reach.amin(1, keepdim=True)  # as far as both lines of a node reach
    near = torch.minimum((shared - begin).clamp_(min=0).view_as(left), left)
    far = left - near  # on two lines of all devices
    begins = torch.stack([begin.reshape(left.shape), holders.earlier @ far])
    ends = begins + torch.stack([near, far])
    # The source's tokens and the quotas of all devices overlap in these intervals of both lines.
    token_begin, quota_begin = begins.split(num_experts, 2)
    token_end, quota_end = ends.split(num_experts, 2)
    source = slice(holders.source, holders.source + 1)
    last_begin = torch.maximum(token_begin[:, source], quota_begin)
    overlap = torch.minimum(token_end[:, source], quota_end).sub_(last_begin).clamp_(min=0)
    return torch.addcmul((overlap * holders.reaches).sum(0), own, holders.is_source)
