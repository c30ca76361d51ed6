from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives import link_probes
from megatron_fssdp.collectives.link_probes import measure_collective, measure_links
from megatron_fssdp.planning.cost.cost_model import LEAST_BETA_S_PER_BYTE, LinkCost
from megatron_fssdp.planning.cost.link_seconds import moves_traffic
from megatron_fssdp.planning.placement.topology import Topology
from tests.planning.placement_cases import pairs_traffic
from tests.support.training_preload import on_plain_ranks

CPU = torch.device("cpu")
SIZES = (1 << 10, 1 << 14, 1 << 18)


@dataclass(frozen=True)
class Machine:
    """Nodes with paced links: a device's link inside its node, its NIC, and the network of its node."""

    nodes: tuple[int, ...]
    near_bytes_per_s: float = 1e9
    nic_bytes_per_s: float = 1e8
    node_bytes_per_s: float = 8e8

    def seconds(self, bytes_DD):
        """Seconds of messages that travel at the same time, until the busiest link has carried its bytes."""
        node_D = np.array(self.nodes)
        is_far_DD = node_D[:, None] != node_D
        far_DD, near_DD, limits = bytes_DD * is_far_DD, bytes_DD * ~is_far_DD, [0.0]
        for axis in (0, 1):
            limits.append(near_DD.sum(axis).max() / self.near_bytes_per_s)
            limits.append(far_DD.sum(axis).max() / self.nic_bytes_per_s)
            limits.append(np.bincount(node_D, far_DD.sum(axis)).max() / self.node_bytes_per_s)
        return 1e-3 + max(limits)

    def probe_s(self, group, edges, device, sizes):
        """In place of ``_fastest_exchanges_s``."""
        ones_DD = np.zeros((len(self.nodes),) * 2)
        np.add.at(ones_DD, tuple(np.transpose(edges)), 1.0)
        return [self.seconds(size * ones_DD) for size in sizes]


@pytest.mark.parametrize("node_bytes_per_s", [8e8, 2e8, 1e8])
@pytest.mark.parametrize(
    "nodes", [(0,) * 8 + (1,) * 8, (0, 1, 0, 1), (0, 0, 1, 2, 2, 2), (0, 0, 0, 1), (0, 1, 2)], ids=str
)
def test_prices_of_exchanges_and_transfers_are_right_within_5_percent(nodes, node_bytes_per_s, monkeypatch):
    """Every device has a NIC, and one, two or eight of them fill the network of their node."""
    machine, topology = Machine(nodes, node_bytes_per_s=node_bytes_per_s), Topology(nodes)
    monkeypatch.setattr(link_probes, "_fastest_exchanges_s", machine.probe_s)
    monkeypatch.setattr(link_probes, "_slowest", lambda seconds, *_: [*seconds])
    links = measure_links(None, topology, CPU)
    rng, num_devices = np.random.default_rng(1), len(nodes)
    for hot in (1, 1, 50):
        bytes_DD = rng.gamma(1.0, 1e6, (num_devices, num_devices))
        bytes_DD[:, -1] *= hot  # the last device has the hot experts
        np.fill_diagonal(bytes_DD, 0)
        priced_s = links.times(pairs_traffic(bytes_DD, topology), 1.0).seconds
        assert priced_s == pytest.approx(machine.seconds(bytes_DD), rel=0.05)
    source_P, device_P = rng.integers(0, num_devices, (2, 12))
    moved_DD = np.zeros((num_devices, num_devices))
    np.add.at(moved_DD, (source_P, device_P), 5e7)  # experts of 50 MB
    np.fill_diagonal(moved_DD, 0)
    priced_s = links.times(moves_traffic(source_P, device_P, topology), 5e7).seconds
    assert priced_s == pytest.approx(machine.seconds(moved_DD), rel=0.05)


# Nodes of four devices; the slowest rank's share of each class of links; the probes of each rank.
CLASSES = [
    ((0, 0, 0, 0), (4, 4, 4), (1, 1, 1, 1)),
    # A byte of a node is half of one of each device. One device of each node also sends alone.
    ((0, 0, 1, 1), (4, 20, 30), (3, 2, 3, 2)),
    ((0, 1, 2, 3), (40, 40, 40), (1, 1, 1, 1)),
    # A node of one device has no link inside, and fills its NIC alone.
    ((0, 1, 1, 1), (4, 20, 20), (1, 2, 1, 1)),
]


def links_between(nodes, exchange_s=None, **options):
    """The links that ranks measure, near ones first; ``exchange_s`` plants times for edges and bytes."""
    if exchange_s is not None:
        link_probes._exchange_s = lambda group, edges, num_bytes, device: exchange_s(edges, num_bytes)
    links = measure_links(dist.group.WORLD, Topology(nodes), CPU, **options)
    return [links.near, links.far_of_node, links.far_of_device]


@on_plain_ranks(4)
def test_a_class_of_links_has_the_costs_of_its_slowest_link():
    """Messages of rank r take r + 1 ms and r + 1 ns a byte, and ten times as long between nodes."""
    rank = dist.get_rank()
    for nodes, slowest, num_probes in CLASSES:
        probes = []

        def given_s(edges, num_bytes, nodes=nodes, probes=probes):
            if edges not in probes:
                probes.append(edges)
            crosses = any(nodes[source] != nodes[target] for source, target in edges)
            return (rank + 1) * (1e-3 + 1e-9 * num_bytes) * (10 if crosses else 1)

        links = links_between(nodes, given_s)
        assert len(probes) == num_probes[rank]
        assert [link.beta_s_per_byte for link in links] == pytest.approx([1e-9 * times for times in slowest])
        all_at_once = nodes == (0, 0, 1, 1)
        alphas = [1e-3 * times for times in ((4, 40, 30) if all_at_once else slowest)]
        assert [link.alpha_s for link in links] == pytest.approx(alphas)


@on_plain_ranks(3)
def test_rounds_in_which_larger_messages_were_faster_are_repeated_and_bytes_are_never_free():
    """In the first rounds, another process delays rank 0's small messages by a second."""
    large = 1 << 22
    for rounds, wanted in ((0, (1e-3, 1e-9)), (7, (1e-3, 1e-9)), (8, (0, (1e-3 + 1e-9 * large) / large))):
        counted = Counter()

        def given_s(edges, num_bytes, counted=counted, rounds=rounds):
            counted[num_bytes] += 1
            is_disturbed = dist.get_rank() == 0 and counted[num_bytes] <= rounds * link_probes._REPETITIONS
            return 1e-3 + 1e-9 * num_bytes + (is_disturbed and num_bytes < large)

        # Rank 2 is alone in its node, so it only takes part in the reduction over ranks.
        near, *_ = links_between((0, 0, 1), given_s)
        assert (near.alpha_s, near.beta_s_per_byte) == pytest.approx(wanted)


@on_plain_ranks(2)
def test_messages_of_a_whole_expert_are_measured_where_they_are_fast():
    """Messages above 4 MiB take half of the time for a byte."""
    for most_bytes, beta_s, is_measured in (
        (1 << 28, 1e-10, True),
        (1 << 28, 1e-9, False),
        (99, 1e-10, False),
    ):
        sizes = []

        def given_s(edges, num_bytes, sizes=sizes, beta_s=beta_s):
            sizes.append(num_bytes)
            return 1e-4 + beta_s * num_bytes / (1 if num_bytes <= 1 << 22 else 2)

        near, *_ = links_between((0, 0), given_s, most_bytes=most_bytes)
        assert (most_bytes in sizes) == is_measured
        assert (near.time_s(1 << 28) < 0.75 * (1e-4 + beta_s * (1 << 28))) == is_measured


@on_plain_ranks(4)
def test_real_links_cost_something_and_all_ranks_know_them():
    links, of_ranks = links_between((0, 0, 1, 1)), [None] * 4
    dist.all_gather_object(of_ranks, links)
    assert of_ranks == [links] * 4
    assert all(link.beta_s_per_byte > LEAST_BETA_S_PER_BYTE for link in links)
    assert all(link.time_s(1 << 22) > 1e-5 for link in links), "4 MiB were not sent"


@on_plain_ranks(1)
def test_one_device_has_no_links():
    assert links_between((0,)) == [LinkCost(0.0, LEAST_BETA_S_PER_BYTE)] * 3


@on_plain_ranks(3)
def test_the_fit_uses_the_median_of_the_slowest_rank():
    """Make the call but plant its time: rank r takes r + 1 ms and r + 1 ns a byte, and once far more."""
    rank, sent, original = dist.get_rank(), [], link_probes._prepare

    def prepare(num_bytes, group, device):
        call, sent_bytes = original("all_gather", num_bytes, group, device)

        def noted():
            sent.append(sent_bytes)
            return call()

        return noted, sent_bytes

    def given_s(call, device):
        call()
        # The first call connects, and the third one is slow.
        outlier_s = 5.0 if len(sent) % 6 in (1, 3) else 0.0
        return (rank + 1) * (1e-3 + 1e-9 * sent[-1]) + outlier_s

    link_probes.elapsed_s = given_s
    sizes = {"message_bytes": SIZES, "num_repetitions": 5}
    fit = measure_collective("all_to_all", dist.group.WORLD, dist.group.WORLD, CPU, prepare=prepare, **sizes)
    assert fit.cost.alpha_s == pytest.approx(3e-3)
    assert fit.cost.beta_s_per_byte == pytest.approx(3e-9)
    assert fit.worst_relative_error == pytest.approx(0, abs=1e-9)
