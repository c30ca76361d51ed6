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

Shape letters: T tokens, E experts, D devices, W slots of all devices.
"""

from dataclasses import dataclass

import torch

from megatron_fssdp.collectives.probes.device_timing import elapsed_s
from megatron_fssdp.runtime.slots.remap import number_tokens_ET, route_to

EXPONENTS = (3, 1) * 4
"""Exponent of the correction in each round of levelling. 1 is Sinkhorn's iteration, stable but slow: it
leaves a part s of an error, 0 ≤ s < 1. The exponents 3 and 1 together leave s·(3s - 2)."""

ENOUGH = 1.005
"""Even dispatch stays if its highest device load divided by that of the exact shares is at most this."""

_ANY_HOLDER = 0.02  # part of the prior for holders that even dispatch may give nothing
_LEAST_LOAD = 1e-4  # in mean loads; keeps the weights of devices without tokens finite
_RUNS = 5  # the first one is slow
_TOKEN_PARTS = 20  # bits below a whole token while parts are added up


@dataclass(frozen=True, eq=False)
class Holders:
    """A plan as the exact shares of one source see it. Made once for each plan, on the device.

    Attributes:
        source: Number of this device.
        slot_ED: A slot of the expert for each expert and device: the device's, if it has one; ``[E, D]``.
        present_DE: 1 where a device holds an expert, float64 ``[D, E]``.
        near_DE: 1 where a source lacks an expert and its node has it, float64 ``[D, E]``.
        far_DE: 1 where a source's node lacks an expert, float64 ``[D, E]``.
        num_chosen_DE: Over how many holders even dispatch splits a source's tokens, float64 ``[D, E]``.
        turn_DE: Turn of each holder when even dispatch deals out this source's remainders, from 0; D for
            devices that get none of the source's tokens. int64 ``[D, E]``.
        same_node_DD: 1 where two devices share a node, float64 ``[D, D]``.
    """

    source: int
    slot_ED: torch.Tensor
    present_DE: torch.Tensor
    near_DE: torch.Tensor
    far_DE: torch.Tensor
    num_chosen_DE: torch.Tensor
    turn_DE: torch.Tensor
    same_node_DD: torch.Tensor

    @classmethod
    def of(cls, slot_ED: torch.Tensor, node_D: torch.Tensor, source: int) -> "Holders":
        """Derive the tensors of one source from a plan, without a host wait.

        Args:
            slot_ED: :attr:`~megatron_fssdp.planning.slots.slot_table.SlotTable.slot_ED` as a tensor.
            node_D: Node of each device, int64 ``[D]``.
            source: Number of this device.
        """
        present_DE = (slot_ED >= 0).t().double()
        same_node_DD = (node_D[:, None] == node_D).double()
        in_node_DE = same_node_DD @ present_DE
        far_DE = (in_node_DE == 0).double()
        near_DE = 1 - present_DE - far_DE
        num_chosen_DE = present_DE + near_DE * in_node_DE + far_DE * present_DE.sum(0)
        # The holders among which this source chooses are a ring, as in even dispatch.
        chosen_DE = present_DE * (near_DE[source] * same_node_DD[source][:, None] + far_DE[source])
        chosen_DE[source] += present_DE[source]
        rank_DE = (chosen_DE.cumsum(0) - chosen_DE).long()
        expert_E = torch.arange(slot_ED.shape[0], device=slot_ED.device)
        turn_DE = (rank_DE - source - expert_E) % num_chosen_DE[source].long()
        turn_DE.masked_fill_(chosen_DE == 0, slot_ED.shape[1])
        slot_ED = torch.where(slot_ED >= 0, slot_ED, slot_ED.amax(1, keepdim=True))
        return cls(source, slot_ED, present_DE, near_DE, far_DE, num_chosen_DE, turn_DE, same_node_DD)


def seconds_of_shares(slot_ED: torch.Tensor, node_D: torch.Tensor) -> float:
    """Measure how long a device takes to compute exact shares, for prices; of several runs, the fastest.

    Args:
        slot_ED: A slot of each expert on each device, int64 ``[E, D]`` on the device.
        node_D: Node of each device, int64 ``[D]`` on the device.
    """
    holders = Holders.of(slot_ED, node_D, 0)
    counts_DE = torch.ones_like(slot_ED.t())
    return min(elapsed_s(lambda: exact_ends_ED(counts_DE, holders), slot_ED.device) for _ in range(_RUNS))


def remap_exactly(
    routing_map: torch.Tensor, probs: torch.Tensor, counts_DE: torch.Tensor, holders: Holders, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route to slots by shares of the present counts: the counterpart of ``remap_by_table``.

    Args:
        routing_map: Whether each token goes to each expert, bool ``[T, E]``.
        probs: Routing probabilities, ``[T, E]`` of any floating type. The gradient is a gather.
        counts_DE: Tokens of every source for every expert, int64 ``[D, E]``; this source's row has the sums
            of the map's columns.
        holders: The plan, seen from this source.
        num_slots: Slots of all devices together, D*U.

    Returns:
        Routing map of the slots, bool ``[T, W]``, and their probabilities, ``[T, W]``.
    """
    return remap_by_ends(routing_map, probs, exact_ends_ED(counts_DE, holders), holders, num_slots)


def remap_by_ends(
    routing_map: torch.Tensor, probs: torch.Tensor, end_ED: torch.Tensor, holders: Holders, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route the n-th token of an expert, from 0, to the first device whose end is above n.

    ``end_ED`` is the result of :func:`exact_ends_ED`, the rest as for :func:`remap_exactly`. Tokens above all
    ends, of which the counts did not know, go to some slot of their expert.
    """
    place_ET = torch.searchsorted(end_ED, number_tokens_ET(routing_map)).clamp_(max=end_ED.shape[1] - 1)
    return route_to(holders.slot_ED.gather(1, place_ET), routing_map, probs, num_slots)


def exact_ends_ED(counts_DE: torch.Tensor, holders: Holders) -> torch.Tensor:
    """Where each device's interval of this source's tokens of each expert ends, int64 ``[E, D]``.

    Args:
        counts_DE: Tokens of every source for every expert, int64 ``[D, E]``.
        holders: The plan, seen from this source.
    """
    counts = counts_DE.double()
    share_DE = counts / holders.num_chosen_DE
    # Even dispatch gives each holder the whole part of its share at least.
    even_DE, least_DE = _spread(torch.stack([share_DE, share_DE.floor()]), holders)
    quota_DE = _whole(_levelled(counts.sum(0), even_DE, holders.present_DE))
    pays = quota_DE.sum(1).amax() * ENOUGH < least_DE.sum(1).amax()
    sent_DE = torch.where(pays, _filled(counts, quota_DE, holders), _even(counts_DE[holders.source], holders))
    return sent_DE.t().contiguous().cumsum(1)


def _spread(share_DE: torch.Tensor, holders: Holders) -> torch.Tensor:
    """Tokens that each device computes if a source sends its share to each holder that it chooses."""
    near_DE = holders.same_node_DD @ (share_DE * holders.near_DE)
    far_E = (share_DE * holders.far_DE).sum(-2, keepdim=True)
    return (share_DE + near_DE + far_E) * holders.present_DE


def _levelled(total_E: torch.Tensor, even_DE: torch.Tensor, present_DE: torch.Tensor) -> torch.Tensor:
    """Parts of the experts' tokens that level the loads of the devices, float64 ``[D, E]``.

    The weights of the devices are all that changes, so a round is two products with a ``[D, E]`` matrix.
    """
    prior_DE = even_DE + present_DE * ((total_E + 1) * _ANY_HOLDER / present_DE.sum(0))
    prior_ED = prior_DE.t()
    load_E = total_E * (len(present_DE) / total_E.sum().clamp(min=1))  # in mean device loads
    weight_D = torch.ones_like(prior_DE[:, 0])
    least_D = weight_D * _LEAST_LOAD
    for exponent in EXPONENTS:
        load_D = weight_D * torch.addmv(least_D, prior_DE, load_E / prior_ED.mv(weight_D))
        weight_D = weight_D * load_D.pow(-exponent)
    return prior_DE * weight_D[:, None] * (total_E / prior_ED.mv(weight_D))


def _whole(tokens_DE: torch.Tensor) -> torch.Tensor:
    """Round parts along the devices; each expert's sum, a whole number, stays. float64 ``[D, E]``.

    Whole numbers of small parts of a token are added up, so 0 stays 0 in whatever order a device adds.
    """
    parts_DE = (tokens_DE * 2**_TOKEN_PARTS).long().cumsum(0)
    end_DE = (parts_DE + 2 ** (_TOKEN_PARTS - 1)) >> _TOKEN_PARTS
    return end_DE.diff(dim=0, prepend=torch.zeros_like(end_DE[:1])).double()


def _filled(counts_DE: torch.Tensor, quota_DE: torch.Tensor, holders: Holders) -> torch.Tensor:
    """Tokens that this source sends to each device if quotas get the nearest tokens, int64 ``[D, E]``.

    Both arguments are whole numbers, which float64 adds exactly.
    """
    source, same_node_DD = holders.source, holders.same_node_DD
    own_DE = torch.minimum(counts_DE, quota_DE)
    # First index: 0 for tokens that leave their source, 1 for open quotas. Both have a line in each node.
    open_DE = torch.stack([counts_DE - own_DE, quota_DE - own_DE])
    begin_DE = same_node_DD.tril(-1) @ open_DE
    shared_DE = (same_node_DD @ open_DE).amin(0)  # as far as both lines of a node reach
    near_DE = torch.minimum((shared_DE - begin_DE).clamp(min=0), open_DE)
    far_DE = open_DE - near_DE  # on two lines of all devices
    near = _overlap(begin_DE, near_DE, source) * same_node_DD[source][:, None]
    sent_DE = near + _overlap(far_DE.cumsum(1) - far_DE, far_DE, source)
    sent_DE[source] += own_DE[source]
    return sent_DE.long()


def _overlap(begin_DE: torch.Tensor, length_DE: torch.Tensor, source: int) -> torch.Tensor:
    """Length of the common part of the source's tokens and each device's quotas on a line, ``[D, E]``."""
    end_DE = begin_DE + length_DE
    last_begin_DE = torch.maximum(begin_DE[0, source], begin_DE[1])
    return (torch.minimum(end_DE[0, source], end_DE[1]) - last_begin_DE).clamp(min=0)


def _even(count_E: torch.Tensor, holders: Holders) -> torch.Tensor:
    """Tokens that this source sends to each device under even dispatch (Hecate, §4.4), int64 ``[D, E]``."""
    num_E = holders.num_chosen_DE[holders.source].long()
    whole_E = count_E // num_E
    chosen_DE = holders.turn_DE < len(holders.turn_DE)
    return whole_E * chosen_DE + (holders.turn_DE < count_E - whole_E * num_E)
