import numpy as np
import pytest

from megatron_fssdp.collectives.sparse.wavefront import Wavefront
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.testing.random_placement import plain_transfer, random_placement


def plans(num_cases=40):
    rng = np.random.default_rng(0)
    for _ in range(num_cases):
        num_nodes = int(rng.choice([1, 2, 4]))
        num_devices = num_nodes * int(rng.integers(1, 5))
        placement = random_placement(rng, int(rng.integers(1, 9)), num_devices)
        yield plain_transfer(placement)
        yield two_level_transfer(placement, Topology.uniform(num_devices, num_nodes))


@pytest.mark.parametrize("build", [Wavefront.of_gather, Wavefront.of_reduction])
@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_each_step_receives_what_it_sends_in_the_same_order(build, num_chunks):
    for plan in plans():
        devices = range(plan.num_devices)
        waves = [build(plan, device, num_chunks) for device in devices]
        for t in range(-1, waves[0].num_steps + 1):
            steps = [wave.step(t) for wave in waves]
            for a in devices:
                for b in devices:
                    sent = [(m.expert, m.chunk) for m in steps[a].sends if m.peer == b]
                    received = [(m.expert, m.chunk) for m in steps[b].receives if m.peer == a]
                    assert sent == received
        num_sends = sum(len(w.step(t).sends) for w in waves for t in range(w.num_steps))
        assert num_sends == num_chunks * len(plan.table)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_device_forwards_a_chunk_only_after_it_is_complete(num_chunks):
    for plan in plans():
        for device in range(plan.num_devices):
            gather = Wavefront.of_gather(plan, device, num_chunks)
            got = {(e, c) for e in {edge.expert for edge in plan.edges} for c in range(num_chunks)}
            got -= {(e, c) for _, _, e in gather.receive_routes for c in range(num_chunks)}
            reduction = Wavefront.of_reduction(plan, device, num_chunks)
            missing = {e: sum(edge[:2] == (e, device) for edge in plan.edges) * num_chunks for e, _ in got}
            left = {(e, c): n // num_chunks for e, n in missing.items() for c in range(num_chunks)}
            for t in range(gather.num_steps):
                assert all((m.expert, m.chunk) in got for m in gather.step(t).sends)
                got |= {(m.expert, m.chunk) for m in gather.step(t).receives}
                for m in reduction.step(t).sends:
                    assert left.get((m.expert, m.chunk), 0) == 0
                for m in reduction.step(t).receives:
                    if (m.expert, m.chunk) in left:
                        left[m.expert, m.chunk] -= 1
            # Levels work at the same time, and the reduction mirrors the gather.
            assert gather.num_steps == reduction.num_steps == num_chunks + plan.max_depth
            sent = [len(gather.step(t).sends) for t in range(gather.num_steps)]
            assert sent[::-1] == [len(reduction.step(t).receives) for t in range(gather.num_steps)]
