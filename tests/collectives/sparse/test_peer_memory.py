"""Puts into the memory of peers keep the order of readers and writers."""

from datetime import timedelta
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.sparse.peer_memory import SharedMemory, SymmetricMemory, WeightPuts
from megatron_fssdp.testing import run_ranks
from tests.support.training_preload import on_plain_ranks

TIMEOUT = timedelta(seconds=600)


@on_plain_ranks(2)
def test_no_slot_is_read_before_its_signal_or_overwritten_before_its_last_reader():
    """Rank 1 puts versions 1, 2 and 3 into the slot of rank 0; both hold up the other at the worst moment.

    The sender stops in the middle of each version until the receiver lets it go on. The receiver reads a
    version until the sender has tried to write the next one.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    memory = SharedMemory(dist.group.WORLD, (1, 1000), TIMEOUT, dtype=torch.float32)
    puts = WeightPuts(memory, {1 - rank: 1 - rank}, {(0, 0): 0})
    for version in (1, 2, 3):
        if rank == 1:
            store.set(f"tries {version}", "")
            puts.open((), {0})
            value = torch.full((500,), float(version))

            def halves(version=version, value=value):
                first, second = puts.slot(0, 0).split(500)
                yield first, value
                store.set(f"half {version}", "")
                store.get(f"go {version}")
                yield second, value

            puts.put({0: halves()})
            continue
        slot = memory.of_rank[0][0]
        store.get(f"tries {version}")
        # The last reader still has the version before.
        assert not comes(store, f"half {version}", 0.1)
        assert slot.eq(version - 1).all()
        puts.open({1}, ())
        store.get(f"half {version}")
        reader = Thread(target=puts.await_step, args=([1],))
        reader.start()
        reader.join(0.1)
        assert reader.is_alive()
        store.set(f"go {version}", "")
        reader.join()
        assert slot.eq(version).all()


def comes(store, key, within_s):
    try:
        store.wait([key], timedelta(seconds=within_s))
    except dist.DistStoreError:
        return False
    return True


@on_plain_ranks(2)
def test_a_peer_that_is_gone_ends_the_wait():
    memory = SharedMemory(dist.group.WORLD, (1, 1), timedelta(seconds=0.05), dtype=torch.float32)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="got no flag"):
            memory.await_signal(1, 0)


def put_on_one_card(rank, world_size):
    """Each rank puts rising versions into the slots of all others, and reads its own beside them."""
    device, sizes = torch.device("cuda", 0), 1 << 20
    memory = SymmetricMemory(
        dist.group.WORLD, (world_size, sizes), TIMEOUT, dtype=torch.float32, device=device
    )
    others = {peer: peer for peer in range(world_size) if peer != rank}
    puts = WeightPuts(memory, others, {(d, e): e for d in range(world_size) for e in range(world_size)})
    side, sums = torch.cuda.Stream(device), []
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for version in range(1, 11):
            value = torch.full((sizes,), float(version), device=device)
            puts.open(others, others)
            puts.put({peer: [(puts.slot(peer, rank), value)] for peer in others})
            puts.await_step(others)
            sums += [(memory.of_rank[rank][peer] == version).all() for peer in others]
    side.synchronize()
    return [bool(is_equal) for is_equal in sums]


@pytest.mark.gpu(real=True)
def test_symmetric_memory_on_one_card():
    # torch refuses two ranks on one device otherwise.
    env = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    for are_equal in run_ranks(put_on_one_card, 4, env=env, preload=()):
        assert all(are_equal)
