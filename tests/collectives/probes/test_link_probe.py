"""Costs of links, measured with real messages and fitted to planted times."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.probes import link_probe
from megatron_fssdp.collectives.probes.link_probe import measure_links
from megatron_fssdp.planning.cost.cost_model import LinkCost
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.testing import run_ranks


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

    link_probe._exchange_s = given_s
    return (*measure_links(dist.group.WORLD, topology, torch.device("cpu")), rings)


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
        is_disturbed = rank == 0 and counted[num_bytes] <= disturbed_rounds * link_probe._REPETITIONS
        return 1e-3 + 1e-9 * num_bytes + (is_disturbed and num_bytes < 1 << 22)

    link_probe._exchange_s = given_s
    # Rank 2 is alone in its node, so it only takes part in the reduction over ranks.
    return measure_links(dist.group.WORLD, Topology((0, 0, 1)), torch.device("cpu"))[0]


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
