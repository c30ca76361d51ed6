import contextlib
from functools import partial

import torch
import torch.distributed as dist

from devtools.virtual_cuda import EventKind, FindingKind, virtual_cuda
from tests.support.training_preload import on_plain_ranks

# Results of all_calls on both ranks.
RESULTS = {
    "all_reduce": ([3.0] * 2,) * 2,
    "broadcast": ([2.0] * 2,) * 2,
    "all_gather_into_tensor": ([1.0, 1.0, 2.0, 2.0],) * 2,
    "all_gather of different sizes": ([1.0, 2.0, 2.0],) * 2,
    "reduce_scatter_tensor": ([3.0], [30.0]),
    "reduce_scatter of different sizes": ([3.0], [30.0, 30.0]),
    "all_to_all_single": ([1.0, 2.0, 2.0], [1.0, 1.0, 2.0]),
    "all_to_all": ([1.0, 2.0], [10.0, 20.0]),
    "isend and irecv": ([2.0], [1.0]),
    "batch_isend_irecv": ([2.0], [1.0]),
    "coalesced all_reduce": ([3.0, 30.0],) * 2,
    "all_gather_object": ([0, 1],) * 2,
}


def full(*shape, value=0.0, device="cuda"):
    return torch.full(shape, value, device=device)


def all_calls(rank, device="cuda"):
    """Results of one call of every kind, as lists."""
    mine, peer = float(rank + 1), 1 - rank
    results = {}
    on = partial(full, device=device)

    def note(name, *tensors):
        results[name] = [value for tensor in tensors for value in tensor.tolist()]

    dist.all_reduce(x := on(2, value=mine))
    note("all_reduce", x)
    dist.broadcast(x := on(2, value=mine), 1)
    note("broadcast", x)
    dist.all_gather_into_tensor(out := on(4), on(2, value=mine))
    note("all_gather_into_tensor", out)
    dist.all_gather(parts := [on(1), on(2)], on(rank + 1, value=mine))
    note("all_gather of different sizes", *parts)
    dist.reduce_scatter_tensor(out := on(1), torch.tensor([mine, 10 * mine], device=device))
    note("reduce_scatter_tensor", out)
    dist.reduce_scatter(out := on(rank + 1), [on(1, value=mine), on(2, value=10 * mine)])
    note("reduce_scatter of different sizes", out)
    sizes = [1, 2] if rank == 0 else [2, 1]
    dist.all_to_all_single(out := on(3), on(3, value=mine), sizes, sizes)
    note("all_to_all_single", out)
    dist.all_to_all(parts := [on(1), on(1)], [on(1, value=mine), on(1, value=10 * mine)])
    note("all_to_all", *parts)
    for work in (dist.isend(on(1, value=mine), peer), dist.irecv(out := on(1), peer)):
        work.wait()
    note("isend and irecv", out)
    send = dist.P2POp(dist.isend, on(1, value=mine), peer)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, out := on(1), peer)]):
        work.wait()
    note("batch_isend_irecv", out)
    x, y = on(1, value=mine), on(1, value=10 * mine)
    with dist._coalescing_manager(async_ops=True) as coalesced:
        dist.all_reduce(x)
        dist.all_reduce(y)
    coalesced.wait()
    note("coalesced all_reduce", x, y)
    results["all_gather_object"] = [None, None]
    dist.all_gather_object(results["all_gather_object"], rank)
    dist.barrier()
    return results


@on_plain_ranks(2)
def test_every_call_moves_the_data_that_nccl_would_move():
    rank = dist.get_rank()
    with virtual_cuda() as device:
        assert all_calls(rank) == {name: values[rank] for name, values in RESULTS.items()}
        assert dist.get_backend() == dist.get_backend(dist.new_group(backend="nccl")) == "nccl"
        assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"
    assert not device.findings
    assert device.counts["P2P batch"] == 3


def forget_to_wait():
    x = full(2, value=1.0)
    dist.all_reduce(x, async_op=True)
    x.add_(1)


def wait_on_another_stream():
    x = full(2, value=1.0)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
    x.add_(1)


def send_a_cpu_tensor():
    dist.all_reduce(torch.ones(2))


def send_every_second_number():
    dist.all_reduce(full(2, 2)[:, 0])


def forget_to_wait_for_a_message():
    peer, out = 1 - dist.get_rank(), full(1)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, full(1), peer), dist.P2POp(dist.irecv, out, peer)])
    assert len(works) == 1
    out.add_(1)


MISTAKES = {
    forget_to_wait: [FindingKind.RACE],
    wait_on_another_stream: [FindingKind.RACE, FindingKind.FREED_IN_USE],
    forget_to_wait_for_a_message: [FindingKind.RACE],
    send_a_cpu_tensor: [FindingKind.NCCL_CPU],
    send_every_second_number: [FindingKind.NCCL_NOT_CONTIGUOUS],
}


@on_plain_ranks(2)
def test_mistakes_are_found():
    for call, kinds in MISTAKES.items():
        refused = contextlib.suppress(ValueError, RuntimeError)  # gloo refuses what is not contiguous
        with virtual_cuda() as device, refused:
            call()
        assert [finding.kind for finding in device.findings] == kinds


@on_plain_ranks(2)
def test_a_work_handle_keeps_tensors_until_the_wait():
    with virtual_cuda() as device:
        work = dist.all_reduce(full(128), async_op=True)  # Only the handle keeps the tensor alive.
        assert torch.cuda.memory_allocated() == 512
        work.wait()
        assert torch.cuda.memory_allocated() == 0
        (event,) = device.events_of(EventKind.COLLECTIVE)
        assert event.num_bytes == 512
    assert not device.findings
