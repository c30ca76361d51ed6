"""Which device computes how many tokens of each expert, and from which sources these come.

A policy says how many tokens of an expert each of its holders computes. Everything else follows: a holder
computes its own tokens first, then tokens of its node, then those of other nodes; where several sources or
holders share, they share in proportion. Numbers are not rounded to whole tokens.

Shape letters: E experts, D devices, N nodes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

DispatchPolicy = Literal["even", "exact", "owner"]
"""How the tokens of an expert are divided among its holders.

``even``: in equal parts among the nearest holders (Hecate §4.4). ``exact``: by the counts of the micro-batch,
so that device loads become even. ``owner``: all tokens go to the owner, except those of a holder itself
(FasterMoE, §4.1; Pro-Prophet, §IV-A).
"""

EXPONENTS = (3, 1) * 4
"""Exponents of the corrections in rounds of levelling. 1 is Sinkhorn's iteration, which leaves a part s of an
error, 0 ≤ s < 1. The exponents 3 and 1 together leave s·(3s - 2)."""

ENOUGH = 1.005
"""Even dispatch stays if its highest device load divided by that of the exact shares is at most this."""

ANY_HOLDER = 0.02
"""Part of the prior for holders that even dispatch may give nothing."""

LEAST_LOAD = 1e-4
"""In mean loads; keeps the weights of devices without tokens finite."""


@dataclass(frozen=True)
class BusiestLinks:
    """Units (tokens or experts) on the busiest link of each kind, in its busier direction."""

    near: float = 0.0
    far_of_device: float = 0.0
    far_of_node: float = 0.0
    far_of_mean_node: float = 0.0

    @property
    def bounds(self) -> tuple[float, float, float]:
        """What limits an exchange in the kernels: inside nodes, of a node and of a device between nodes."""
        return self.near, self.far_of_node, self.far_of_device


@dataclass(frozen=True, eq=False)
class TokenDispatch:
    """A dispatch of pairs ``counts_DE``. Combine has the same traffic in the other direction.

    A device computes ``tokens_ED`` pairs of each expert, float64; a row sums to the expert's pairs.
    """

    counts_DE: np.ndarray
    tokens_ED: np.ndarray
    topology: Topology

    @cached_property
    def _own_ED(self) -> np.ndarray:
        """Pairs that stay on their device."""
        return np.minimum(self.tokens_ED, np.asarray(self.counts_DE).T)

    @cached_property
    def _moves(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Pairs that a device gets from its node and from other nodes, and sends there; each ``[E, D]``."""
        wanted_ED, leaving_ED = self.tokens_ED - self._own_ED, np.asarray(self.counts_DE).T - self._own_ED
        wanted_EN, leaving_EN = (
            _over_nodes(moving_ED, self.topology) for moving_ED in (wanted_ED, leaving_ED)
        )
        near_EN, node_D = np.minimum(wanted_EN, leaving_EN), self.topology.node_of_device_D
        got, sent = ((near_EN / np.maximum(all_EN, 1e-300))[:, node_D] for all_EN in (wanted_EN, leaving_EN))
        return wanted_ED * got, wanted_ED * (1 - got), leaving_ED * sent, leaving_ED * (1 - sent)

    @cached_property
    def device_tokens_D(self) -> np.ndarray:
        """Pairs that every device computes, float64 ``[D]``."""
        return np.asarray(self.tokens_ED.sum(axis=0))

    @property
    def whole_tokens_ED(self) -> np.ndarray:
        """:attr:`tokens_ED` in whole numbers with the same sum for each expert, int64."""
        ends_ED = np.rint(np.cumsum(self.tokens_ED, axis=1)).astype(np.int64)
        return np.diff(ends_ED, axis=1, prepend=0)

    @property
    def whole_tokens_D(self) -> np.ndarray:
        """:attr:`device_tokens_D` in whole numbers with the same sum, int64 ``[D]``."""
        return np.diff(np.rint(np.cumsum(self.device_tokens_D)).astype(np.int64), prepend=0)

    @cached_property
    def busiest(self) -> BusiestLinks:
        """Pairs on the busiest links."""
        got_D, far_got_D, sent_D, far_sent_D = (moved_ED.sum(axis=0) for moved_ED in self._moves)
        far_N = [_over_nodes(far_D[None], self.topology) for far_D in (far_sent_D, far_got_D)]
        return BusiestLinks(
            near=float(max(sent_D.max(), got_D.max())),
            far_of_device=float(max(far_sent_D.max(), far_got_D.max())),
            far_of_node=float(max(far_N[0].max(), far_N[1].max())),
            far_of_mean_node=self.cross_node_tokens / self.topology.num_nodes,
        )

    @property
    def cross_node_tokens(self) -> float:
        """Pairs that are sent to another node."""
        return float(self._moves[3].sum(axis=0).sum())

    def sent_ED(self, source: int) -> np.ndarray:
        """Pairs of one source by expert and receiving device, float64 ``[E, D]``."""
        got_ED, far_got_ED, leaving_ED, far_leaving_ED = self._moves
        in_node_D = self.topology.node_of_device_D == self.topology.node_of_device[source]
        sent_ED = np.zeros(got_ED.shape)
        sent_ED[:, source] = self._own_ED[:, source]
        for taken_ED, pairs_ED in ((got_ED * in_node_D, leaving_ED), (far_got_ED, far_leaving_ED)):
            sent_ED += taken_ED * (pairs_ED[:, source] / np.maximum(taken_ED.sum(axis=1), 1e-300))[:, None]
        return sent_ED


def plan_dispatch(
    policy: DispatchPolicy, counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology
) -> TokenDispatch:
    """Plan the dispatch of counts ``[D, E]``, which may be fractions; a ValueError if sizes do not match."""
    wanted = (topology.num_devices, placement.num_experts)
    if np.shape(counts_DE) != wanted or placement.num_devices != topology.num_devices:
        raise ValueError(
            f"the loads have shape {np.shape(counts_DE)} and the placement {placement.num_devices} devices: "
            f"wanted {wanted}, by source device of the topology and expert of the placement"
        )
    counts = np.asarray(counts_DE)
    experts = np.arange(placement.num_experts)
    if not placement.num_replicas:
        tokens_ED = np.zeros((placement.num_experts, topology.num_devices))
        tokens_ED[experts, placement.owner_E] = counts.sum(axis=0)
    elif policy == "owner":
        tokens_ED = counts.T * placement.present_ED.astype(np.float64)
        tokens_ED[experts, placement.owner_E] += counts.sum(axis=0) - tokens_ED.sum(axis=1)
    else:
        tokens_ED = _even(counts, placement, topology)
        if policy == "exact":
            tokens_ED = _exact(counts, placement, topology, tokens_ED)
    return TokenDispatch(counts, tokens_ED, topology)


def _even(counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> np.ndarray:
    """Tokens by expert and device that go to the nearest holders in equal parts (Hecate §4.4)."""
    present_ED = placement.present_ED
    own_ED = counts_DE.T * present_ED
    holders_EN = _over_nodes(present_ED.astype(np.float64), topology)
    rest_EN = _over_nodes(counts_DE.T - own_ED, topology)
    far_E = np.where(holders_EN == 0, rest_EN, 0.0).sum(axis=1) / holders_EN.sum(axis=1)
    near_EN = np.where(holders_EN > 0, rest_EN, 0.0) / np.maximum(holders_EN, 1)
    return np.asarray(own_ED + present_ED * (near_EN[:, topology.node_of_device_D] + far_E[:, None]))


def _exact(
    counts_DE: np.ndarray, placement: ExpertPlacement, topology: Topology, even_ED: np.ndarray
) -> np.ndarray:
    """Tokens by expert and device that level the loads of devices, or the even ones where that gains little.

    For prices, this is what ``runtime/slots/remap/interval_kernel.py`` computes on the device.
    """
    present_ED, total_E = placement.present_ED, counts_DE.sum(axis=0).astype(np.float64)
    prior_ED = even_ED + present_ED * ((total_E + 1) * ANY_HOLDER / present_ED.sum(axis=1))[:, None]
    weight_D = np.ones(placement.num_devices)

    def parts_ED(load_E: np.ndarray) -> np.ndarray:
        """The prior as it is weighted now, with the sums of ``load_E``; without the weights of devices."""
        return np.asarray(prior_ED * (load_E / (prior_ED * weight_D).sum(axis=1))[:, None])

    mean_loads_E = total_E * (placement.num_devices / max(total_E.sum(), 1.0))
    for exponent in EXPONENTS:
        summed_D = parts_ED(mean_loads_E).sum(axis=0)
        weight_D = weight_D * (weight_D * (LEAST_LOAD + summed_D)) ** -exponent
    exact_ED = parts_ED(total_E) * weight_D
    return even_ED if exact_ED.sum(axis=0).max() * ENOUGH >= even_ED.sum(axis=0).max() else exact_ED


def _over_nodes(values_ED: np.ndarray, topology: Topology) -> np.ndarray:
    """Sums over the devices of each node, ``[E, N]``."""
    return topology.sum_over_nodes(values_ED.T).T
