import numpy as np
import pytest

from megatron_fssdp.collectives.sparse.wavefront import steps_of
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from tests.support.random_placement import plain_transfer, random_placement


def plans(num_cases=40):
    rng = np.random.default_rng(0)
    for _ in range(num_cases):
        num_nodes = int(rng.choice([1, 2, 4]))
        num_devices = num_nodes * int(rng.integers(1, 5))
        placement = random_placement(rng, int(rng.integers(1, 9)), num_devices)
        yield plain_transfer(placement)
        yield two_level_transfer(placement, Topology.uniform(num_devices, num_nodes))


@pytest.mark.parametrize("is_gather", [True, False])
@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_each_step_receives_what_it_sends_in_the_same_order(is_gather, num_chunks):
    for plan in plans():
        devices = range(plan.num_devices)
        waves = [steps_of(plan, device, num_chunks, is_gather=is_gather) for device in devices]
        for steps in zip(*waves, strict=True):
            for a in devices:
                for b in devices:
                    sent = [(m.expert, m.chunk) for m in steps[a].sends if m.peer == b]
                    received = [(m.expert, m.chunk) for m in steps[b].receives if m.peer == a]
                    assert sent == received
        num_sends = sum(len(step.sends) for steps in waves for step in steps)
        assert num_sends == num_chunks * len(plan.table)
