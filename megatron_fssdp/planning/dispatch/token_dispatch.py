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

from megatron_fssdp.planning.arrays import views
from megatron_fssdp.planning.compiled_form import kernel
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
        wanted_EN, leaving_EN = (self.topology.sum_over_nodes(of_ED.T).T for of_ED in (wanted_ED, leaving_ED))
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
    def _on_links(self) -> list[float]:
        """Pairs on the busiest link inside a node, of a device and of a node between nodes; all of these."""
        busiest, (node_D, _, first_N) = np.zeros(4), self.topology.arrays
        pairs = (np.ascontiguousarray(of_all, np.float64) for of_all in (self.counts_DE, self.tokens_ED))
        scratch = (np.empty((2, len(first_N) - 1)), np.zeros((4, len(node_D))))
        kernel("token_shares").count_moves(*views(*pairs, node_D, *scratch, busiest))
        return list(busiest.tolist())

    @cached_property
    def busiest(self) -> BusiestLinks:
        """Pairs on the busiest links."""
        near, of_device, of_node, between_nodes = self._on_links
        return BusiestLinks(near, of_device, of_node, between_nodes / self.topology.num_nodes)

    @property
    def cross_node_tokens(self) -> float:
        """Pairs that are sent to another node."""
        return self._on_links[-1]

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
    counts, experts = np.ascontiguousarray(counts_DE), np.arange(placement.num_experts)
    total_E = counts.sum(axis=0)
    tokens_ED = np.zeros((placement.num_experts, topology.num_devices))
    if not placement.num_replicas:
        tokens_ED[experts, placement.owner_E] = total_E
    elif policy == "owner":
        np.multiply(counts.T, placement.present_ED, out=tokens_ED)
        tokens_ED[experts, placement.owner_E] += total_E - tokens_ED.sum(axis=1)
    else:
        node_D, _, first_N = topology.arrays
        layer = (counts.astype(np.float64, copy=False), node_D, *placement.holder_lists)
        scratch = np.empty((2, len(first_N) - 1))
        kernel("token_shares").share_evenly(*views(*layer, scratch, tokens_ED))
        if policy == "exact":
            tokens_ED = _exact(tokens_ED, total_E.astype(np.float64), placement)
    return TokenDispatch(counts, tokens_ED, topology)


def _exact(even_ED: np.ndarray, total_E: np.ndarray, placement: ExpertPlacement) -> np.ndarray:
    """Tokens by expert and device that level the loads of devices, or the even ones where that gains little.

    A holder gets tokens in proportion to its prior, which is the even ones and a little, and to a weight of
    its device. In each round, weights are divided by a power (:data:`EXPONENTS`) of what devices then have.
    For prices, this is what ``runtime/slots/remap/interval_kernel.py`` computes on the device.
    """
    exact_ED, (first_E, holder_P) = even_ED.copy(), placement.holder_lists
    layer = (first_E, holder_P, total_E, np.array(EXPONENTS))
    scratch = (np.empty((2, placement.num_devices)), np.empty(len(holder_P)))
    kernel("token_shares").share_exactly(
        *views(*layer, *scratch, exact_ED), any_holder=ANY_HOLDER, least_load=LEAST_LOAD
    )
    return even_ED if exact_ED.sum(axis=0).max() * ENOUGH >= even_ED.sum(axis=0).max() else exact_ED
