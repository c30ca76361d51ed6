"""Costs of collectives, measured with real messages and fitted to planted times."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.probes import collective_probe
from megatron_fssdp.collectives.probes.collective_probe import measure_collective
from megatron_fssdp.config.cluster_description import CollectiveName
from megatron_fssdp.planning.cost.cost_model import LEAST_BETA_S_PER_BYTE, LinkFit
from megatron_fssdp.testing import run_ranks

CPU = torch.device("cpu")
SIZES = (1 << 10, 1 << 14, 1 << 18)


def pairs(rank: int) -> dist.ProcessGroup:
    """The group of this rank, in a world of two groups of two ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[rank // 2]


def measure_all(rank: int, world_size: int) -> list[LinkFit]:
    """All collectives in pairs and in the whole world, and one among ranks 0 and 1 while the others wait."""
    of_pairs = pairs(rank)
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


def measure_given_times(rank: int, world_size: int) -> LinkFit:
    """Make the call but plant its time: rank r takes r + 1 ms and r + 1 ns a byte, and once far more."""
    sent: list[int] = []
    original = collective_probe._prepare

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

    collective_probe._prepare, collective_probe.elapsed_s = prepare, given_s
    return measure_collective(
        "all_to_all", dist.group.WORLD, dist.group.WORLD, CPU, message_bytes=SIZES, num_repetitions=5
    )


def test_the_fit_uses_the_median_of_the_slowest_rank() -> None:
    for fit in run_ranks(measure_given_times, 3):
        assert fit.cost.alpha_s == pytest.approx(3e-3)
        assert fit.cost.beta_s_per_byte == pytest.approx(3e-9)
        assert fit.worst_relative_error == pytest.approx(0, abs=1e-9)
