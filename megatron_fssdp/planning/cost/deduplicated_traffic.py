"""The two hops of the deduplicated exchange: its rows, and their number as it is estimated from loads.

A token goes at most once to each node that computes one of its experts, and inside the node at most once to
each device. The first hop leads to the *relay* of the token's source in that node: the device with the same
number inside its node. The second hop leads from the relay to the devices of its node::

    source (node 0, second device)        relays: the second devices        devices of each node
    token t, experts on 4 devices    ──>  node 1  ───────────────────────>  its first and second device
                                     ──>  node 2  ───────────────────────>  its first and second device

Results return on the same way, and are summed on the device, on the relay, and at the source.

Loads say how many pairs of token and expert go to a place, but not how many *different* tokens. The estimate
assumes only that tokens select K different experts, and expert e is selected by a share s_e of the source's
tokens. Let a place have the experts 1, 2, … A token that has missed the first j − 1 of them has its K choices
among the others, so it selects expert j more often, with the probability
``s_j K / (K − s_1 − … − s_(j−1))``. The product of the opposite probabilities is the share of tokens that
miss the place. With equal shares this is the exact hypergeometric number. For tokens that draw experts one
after another by log-normal popularity (sigma up to 1.5, top-2 to top-8), the estimate differs by less than
1 % on average and 6 % at worst. Replicas get parts of an expert's tokens, which count as experts. What a run
recorded about its tokens' different nodes and devices scales the estimate (:class:`TokenChoices`).

Shape letters: E experts, D devices, N nodes.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_fssdp.planning.dispatch.token_dispatch import BusiestLinks, plan_dispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True, eq=False)
class TwoHops:
    """Rows of both hops of one micro-batch, known to all ranks.

    From each source, ``tokens_DN`` tokens go to each node, however many of their experts are there, and
    ``tokens_DD`` to each device; int64.
    """

    topology: Topology
    tokens_DN: np.ndarray
    tokens_DD: np.ndarray

    @cached_property
    def relay_DN(self) -> np.ndarray:
        """The device of each node that receives the rows of each source, int64 ``[D, N]``."""
        relay_DN = np.empty((self.topology.num_devices, self.topology.num_nodes), np.int64)
        for members in self.topology.devices_by_node:
            for number, source in enumerate(members):
                relay_DN[source] = [own[number % len(own)] for own in self.topology.devices_by_node]
        return relay_DN

    @property
    def tokens_between_nodes(self) -> float:
        """Tokens that are sent to another node."""
        nodes = np.arange(self.topology.num_nodes)
        return float(self.tokens_DN[self.topology.node_of_device_D[:, None] != nodes].sum())

    def sources(self, relay: int) -> np.ndarray:
        """Sources whose rows a relay receives, ascending."""
        return np.flatnonzero(self.relay_DN[:, self.topology.node_of_device[relay]] == relay)

    def first_hop(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows that a device sends to, and receives from, every device in the first hop, ``[D]`` each."""
        sends_D, receives_D = np.zeros((2, self.topology.num_devices), np.int64)
        sends_D[self.relay_DN[device]] = self.tokens_DN[device]
        sources = self.sources(device)
        receives_D[sources] = self.tokens_DN[sources, self.topology.node_of_device[device]]
        return sends_D, receives_D

    def second_hop(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows that a device sends to, and receives from, every device in the second hop, ``[D]`` each."""
        sends_D, receives_D = np.zeros((2, self.topology.num_devices), np.int64)
        members = list(self.topology.devices_by_node[self.topology.node_of_device[device]])
        sends_D[members] = self.tokens_DD[self.sources(device)][:, members].sum(axis=0)
        receives_D[members] = [self.tokens_DD[self.sources(relay), device].sum() for relay in members]
        return sends_D, receives_D


@dataclass(frozen=True)
class TokenChoices:
    """Experts that a token selects, ``top_k`` (K), and how well the estimate of its places fits.

    The factors are recorded numbers of different nodes and devices of a token over estimated ones; 1 if
    unknown. ``is_fused``: Megatron's dispatcher itself sends each token once (``flex`` with DeepEP, HybridEP
    or NCCL EP), by one kernel whose relays pass rows on while others arrive.
    """

    top_k: int
    node_factor: float = 1.0
    device_factor: float = 1.0
    is_fused: bool = False


def expected_hops(
    load_DE: np.ndarray, placement: ExpertPlacement, topology: Topology, choices: TokenChoices
) -> TwoHops:
    """Expected numbers of different tokens in both hops under even dispatch, from pairs ``[D, E]``."""
    dispatch = plan_dispatch("even", load_DE, placement, topology)
    most_D = load_DE.sum(axis=1) / choices.top_k
    tokens_DN = np.zeros((topology.num_devices, topology.num_nodes))
    tokens_DD = np.zeros((topology.num_devices, topology.num_devices))
    for source in np.flatnonzero(most_D).tolist():
        share_ED = dispatch.sent_ED(source) / most_D[source]
        share_EN = topology.sum_over_nodes(share_ED.T).T
        for tokens, share in ((tokens_DN, share_EN), (tokens_DD, share_ED)):
            tokens[source] = most_D[source] * _reached(share, choices.top_k)
    return TwoHops(
        topology,
        np.minimum(choices.node_factor * tokens_DN, most_D[:, None]),
        np.minimum(choices.device_factor * tokens_DD, most_D[:, None]),
    )


def _reached(shares: np.ndarray, top_k: int) -> np.ndarray:
    """Share of the tokens that go to each place at least once, from shares by expert and place."""
    left = top_k - (np.cumsum(shares, axis=0) - shares)
    chances = np.minimum(shares * top_k / np.maximum(left, 1e-300), 1.0)
    return np.asarray(1.0 - np.prod(1.0 - chances, axis=0))


def hops_traffic(hops: TwoHops) -> BusiestLinks:
    """Tokens on the busiest links: between nodes in the first hop, inside nodes in the second one."""
    topology = hops.topology
    node_D, num_nodes = topology.node_of_device_D, topology.num_nodes
    far_DN = np.where(node_D[:, None] == np.arange(num_nodes), 0, hops.tokens_DN)
    sent_D = far_DN.sum(axis=1)
    received_D = np.zeros(topology.num_devices)
    np.add.at(received_D, hops.relay_DN, far_DN)
    near = 0.0
    for node, members in enumerate(topology.devices_by_node):
        place = np.searchsorted(members, hops.relay_DN[:, node])
        passed = np.zeros((len(members), len(members)))
        np.add.at(passed, place, hops.tokens_DD[:, list(members)])
        np.fill_diagonal(passed, 0)
        near = max(near, passed.sum(axis=0).max(), passed.sum(axis=1).max())
    of_node = max(np.bincount(node_D, weights=sent_D).max(), far_DN.sum(axis=0).max())
    return BusiestLinks(
        near=float(near),
        far_of_device=float(max(sent_D.max(), received_D.max())),
        far_of_node=float(of_node),
        far_of_mean_node=float(sent_D.sum()) / num_nodes,
    )


@lru_cache
def tokens_per_pair(topology: Topology, num_experts: int, choices: TokenChoices) -> tuple[float, float]:
    """Tokens that the deduplicated exchange sends for one pair of the usual one, inside and between nodes.

    They are those of the busiest links under equal loads and even owners. To count tokens, the replica search
    would look at whole nodes at each move.
    """
    devices = topology.num_devices
    placement = ExpertPlacement.owners_only(np.arange(num_experts) * devices // num_experts, devices)
    load_DE = np.ones((devices, num_experts))
    tokens = hops_traffic(expected_hops(load_DE, placement, topology, choices))
    busiest = plan_dispatch("even", load_DE, placement, topology).busiest
    return (
        tokens.near / busiest.near if busiest.near else 1.0,
        tokens.far_of_node / busiest.far_of_node if busiest.far_of_node else 1.0,
    )
