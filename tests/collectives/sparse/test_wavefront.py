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


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_device_forwards_a_chunk_only_after_it_is_complete(num_chunks):
    for plan in plans():
        for device in range(plan.num_devices):
            gather = steps_of(plan, device, num_chunks, is_gather=True)
            incoming = {edge.expert for edge in plan.edges_of(device)[0]}
            got = {(edge.expert, c) for edge in plan.edges for c in range(num_chunks)}
            got = {chunk for chunk in got if chunk[0] not in incoming}
            reduction = steps_of(plan, device, num_chunks, is_gather=False)
            left = {(e, c): sum(edge[:2] == (e, device) for edge in plan.edges) for e, c in got}
            for forward, back in zip(gather, reduction, strict=True):
                assert all((m.expert, m.chunk) in got for m in forward.sends)
                got |= {(m.expert, m.chunk) for m in forward.receives}
                assert all(not left.get((m.expert, m.chunk)) for m in back.sends)
                for m in back.receives:
                    if (m.expert, m.chunk) in left:
                        left[m.expert, m.chunk] -= 1
            # Levels work at the same time, and the reduction mirrors the gather.
            assert len(gather) == num_chunks + plan.max_depth
            sent = [len(step.sends) for step in gather]
            assert sent[::-1] == [len(step.receives) for step in reduction]
