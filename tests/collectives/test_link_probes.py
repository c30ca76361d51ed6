from collections import Counter
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives import link_probes
from megatron_fssdp.collectives.link_probes import measure_collective, measure_links
from megatron_fssdp.config.cluster_description import CollectiveName
from megatron_fssdp.planning.cost.cost_model import LEAST_BETA_S_PER_BYTE, LinkCost, LinkFit
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.testing import run_ranks

CPU = torch.device("cpu")
SIZES = (1 << 10, 1 << 14, 1 << 18)


def measure_given_times(
    rank: int, world_size: int, nodes: tuple[int, ...]
) -> tuple[LinkCost, LinkCost, list]:
    """Links of rank r take r + 1 ms and r + 1 ns a byte; links between nodes take ten times as long."""
    rings: list[list[int]] = []
    topology = Topology(nodes)

    def given_s(group: dist.ProcessGroup, ring: list[int], num_bytes: int, device: torch.device) -> float:
        if ring not in rings:
            rings.append(ring)
        crosses = len({nodes[device] for device in ring}) > 1
        return (rank + 1) * (1e-3 + 1e-9 * num_bytes) * (10 if crosses else 1)

    link_probes._exchange_s = given_s
    return (*measure_links(dist.group.WORLD, topology, CPU), rings)


@pytest.mark.parametrize(
    ("nodes", "slowest_inside", "slowest_between", "rings_of_ranks"),
    [
        ((0, 0, 0, 0), 4, 0.4, [[[0, 1, 2, 3]]] * 4),
        ((0, 0, 1, 1), 4, 3, [[[0, 1], [0, 2]], [[0, 1]], [[2, 3], [0, 2]], [[2, 3]]]),
        ((0, 1, 2, 3), 40, 4, [[[0, 1, 2, 3]]] * 4),
        # A node of one device has no link inside. The first device of each node measures the NIC.
        ((0, 0, 0, 1), 3, 4, [[[0, 1, 2], [0, 3]], [[0, 1, 2]], [[0, 1, 2]], [[0, 3]]]),
    ],
)
def test_a_class_of_links_has_the_costs_of_its_slowest_link(
    nodes: tuple[int, ...],
    slowest_inside: float,
    slowest_between: float,
    rings_of_ranks: list[list[list[int]]],
) -> None:
    for (intra, inter, rings), wanted in zip(
        run_ranks(measure_given_times, 4, nodes), rings_of_ranks, strict=True
    ):
        assert rings == wanted
        assert intra.alpha_s == pytest.approx(slowest_inside * 1e-3)
        assert intra.beta_s_per_byte == pytest.approx(slowest_inside * 1e-9)
        assert inter.alpha_s == pytest.approx(slowest_between * 1e-2)
        assert inter.beta_s_per_byte == pytest.approx(slowest_between * 1e-8)


def measure_disturbed(rank: int, world_size: int, disturbed_rounds: int) -> LinkCost:
    """In the first rounds, another process delays rank 0's small messages by a second."""
    counted: Counter[int] = Counter()

    def given_s(group: dist.ProcessGroup, ring: list[int], num_bytes: int, device: torch.device) -> float:
        counted[num_bytes] += 1
        is_disturbed = rank == 0 and counted[num_bytes] <= disturbed_rounds * link_probes._REPETITIONS
        return 1e-3 + 1e-9 * num_bytes + (is_disturbed and num_bytes < 1 << 22)

    link_probes._exchange_s = given_s
    # Rank 2 is alone in its node, so it only takes part in the reduction over ranks.
    return measure_links(dist.group.WORLD, Topology((0, 0, 1)), CPU)[0]


@pytest.mark.parametrize(
    ("disturbed_rounds", "alpha_s", "beta_s_per_byte"),
    [(0, 1e-3, 1e-9), (7, 1e-3, 1e-9), (8, 0, (1e-3 + 1e-9 * (1 << 22)) / (1 << 22))],
)
def test_rounds_in_which_larger_messages_were_faster_are_repeated_and_bytes_are_never_free(
    disturbed_rounds: int, alpha_s: float, beta_s_per_byte: float
) -> None:
    for cost in run_ranks(measure_disturbed, 3, disturbed_rounds):
        assert cost.alpha_s == pytest.approx(alpha_s)
        assert cost.beta_s_per_byte == pytest.approx(beta_s_per_byte)


def measure_large(rank: int, world_size: int, most_bytes: int, beta_s: float) -> tuple[LinkCost, list[int]]:
    """Messages above 4 MiB take half of the time for a byte."""
    sizes: list[int] = []

    def given_s(group: dist.ProcessGroup, ring: list[int], num_bytes: int, device: torch.device) -> float:
        sizes.append(num_bytes)
        return 1e-4 + beta_s * num_bytes / (1 if num_bytes <= 1 << 22 else 2)

    link_probes._exchange_s = given_s
    return measure_links(dist.group.WORLD, Topology((0, 0)), CPU, most_bytes)[0], sizes


@pytest.mark.parametrize(
    ("most_bytes", "beta_s", "is_measured"),
    [(1 << 28, 1e-10, True), (1 << 28, 1e-9, False), (99, 1e-10, False)],
)
def test_messages_of_a_whole_expert_are_measured_where_they_are_fast(
    most_bytes: int, beta_s: float, is_measured: bool
) -> None:
    for cost, sizes in run_ranks(measure_large, 2, most_bytes, beta_s):
        assert (most_bytes in sizes) == is_measured
        assert (cost.time_s(1 << 28) < 0.75 * (1e-4 + beta_s * (1 << 28))) == is_measured


def measure(rank: int, world_size: int, nodes: tuple[int, ...]) -> tuple[LinkCost, LinkCost]:
    return measure_links(dist.group.WORLD, Topology(nodes), CPU)


def test_real_links_cost_something_and_one_device_has_none() -> None:
    first, *others = run_ranks(measure, 3, (0, 0, 1))
    assert others == [first] * 2
    assert all(link.beta_s_per_byte > LEAST_BETA_S_PER_BYTE for link in first)
    assert all(link.time_s(1 << 22) > 1e-5 for link in first), "4 MiB were not sent"
    no_link = LinkCost(0.0, LEAST_BETA_S_PER_BYTE)
    assert run_ranks(measure, 1, (0,)) == [(no_link, no_link)]


def measure_all(rank: int, world_size: int) -> list[LinkFit]:
    """All collectives in pairs and in the whole world, and one among ranks 0 and 1 while the others wait."""
    of_pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    groups = [(group, name) for group in (of_pairs, dist.group.WORLD) for name in get_args(CollectiveName)]
    groups.append((of_pairs if rank < 2 else None, "point_to_point"))
    return [
        measure_collective(name, group, dist.group.WORLD, CPU, message_bytes=SIZES, num_repetitions=3)
        for group, name in groups
    ]


def test_all_ranks_measure_the_same_positive_costs() -> None:
    of_ranks = run_ranks(measure_all, 4)
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    for fit in of_ranks[0]:
        assert 1e-6 < fit.cost.time_s(SIZES[-1]) < 1
        assert fit.cost.beta_s_per_byte >= LEAST_BETA_S_PER_BYTE
        assert fit.worst_relative_error >= 0
        assert fit.r_squared <= 1


def measure_given_collective(rank: int, world_size: int) -> LinkFit:
    """Make the call but plant its time: rank r takes r + 1 ms and r + 1 ns a byte, and once far more."""
    sent: list[int] = []
    original = link_probes._prepare

    def prepare(name, num_bytes, group, device, num_near):
        call, sent_bytes = original(name, num_bytes, group, device, num_near)

        def noted():
            sent.append(sent_bytes)
            return call()

        return noted, sent_bytes

    def given_s(call, device):
        call()
        # The first call connects, and the third one is slow.
        outlier_s = 5.0 if len(sent) % 6 in (1, 3) else 0.0
        return (rank + 1) * (1e-3 + 1e-9 * sent[-1]) + outlier_s

    link_probes._prepare, link_probes.elapsed_s = prepare, given_s
    return measure_collective(
        "all_to_all", dist.group.WORLD, dist.group.WORLD, CPU, message_bytes=SIZES, num_repetitions=5
    )


def test_the_fit_uses_the_median_of_the_slowest_rank() -> None:
    for fit in run_ranks(measure_given_collective, 3):
        assert fit.cost.alpha_s == pytest.approx(3e-3)
        assert fit.cost.beta_s_per_byte == pytest.approx(3e-9)
        assert fit.worst_relative_error == pytest.approx(0, abs=1e-9)
