"""Costs of links, measured with real messages and fitted to planted times."""

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.probes import link_probe
from megatron_fssdp.collectives.probes.link_probe import measure_links
from megatron_fssdp.planning.cost.cost_model import LEAST_BETA_S_PER_BYTE, LinkCost
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.testing import run_ranks

NODES = [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3), (0, 1, 1, 1)]


def measure(rank: int, world_size: int) -> list[tuple[LinkCost, LinkCost]]:
    return [measure_links(dist.group.WORLD, Topology(nodes), torch.device("cpu")) for nodes in NODES]


def test_all_ranks_measure_the_same_positive_costs() -> None:
    of_ranks = run_ranks(measure, 4)
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    for intra, inter in of_ranks[0]:
        for link in (intra, inter):
            assert LEAST_BETA_S_PER_BYTE < link.beta_s_per_byte < 1e-3
            assert link.alpha_s < 10
            assert link.time_s(1 << 22) > 1e-5, "4 MiB were not sent"
    one_node, two_nodes, alone_in_each, _ = of_ranks[0]
    assert one_node[0] == one_node[1]
    assert two_nodes[0] != two_nodes[1]
    assert alone_in_each[0] == alone_in_each[1]


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


def measure_alone(rank: int, world_size: int) -> tuple[LinkCost, LinkCost]:
    return measure_links(dist.group.WORLD, Topology.uniform(1, 1), torch.device("cpu"))


def test_one_device_has_no_links() -> None:
    ((intra, inter),) = run_ranks(measure_alone, 1)
    assert intra == inter == LinkCost(0.0, LEAST_BETA_S_PER_BYTE)
