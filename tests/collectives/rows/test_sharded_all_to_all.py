"""EP&ESP-AlltoAll, SAA and the division of tokens among tensor-parallel ranks equal dense arithmetic.

Shape letters: D devices, X parts, N tensor-parallel ranks.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.rows.model_parallel import (
    gather_tokens,
    scale_gradient,
    split_rows,
    split_tokens,
    sum_gradient,
    sum_over,
)
from megatron_fssdp.collectives.rows.sharded_all_to_all import ShardedRoute, results_from_parts, rows_to_parts
from megatron_fssdp.collectives.rows.simultaneous_gather import SharedRoute, results_for_all
from megatron_fssdp.testing import run_ranks

WIDTH = 3


def rows_of(world_size, num_devices, empty):
    """Number of rows that each source rank sends to each device."""
    generator = torch.Generator().manual_seed(3)
    sent = torch.randint(0, 5, (world_size, num_devices), generator=generator)
    if empty:
        sent[1] = 0  # one rank sends nothing
        sent[:, 0] = 0  # one device receives nothing
    return sent.tolist()


def route_of(rank, world_size, num_parts, sent):
    num_devices = world_size // num_parts
    device = rank // num_parts
    sources = [source % num_devices * num_parts + source // num_devices for source in range(world_size)]
    receive_S = [sent[source][device] for source in sources]
    return ShardedRoute(dist.group.WORLD, num_parts, sent[rank], receive_S), sources


def to_all_parts_and_back(rank, world_size, num_parts, empty):
    num_devices = world_size // num_parts
    sent = rows_of(world_size, num_devices, empty)
    route, sources = route_of(rank, world_size, num_parts, sent)
    everyones = [
        torch.randn(sum(sent[source]), WIDTH, generator=torch.Generator().manual_seed(source)).double()
        for source in range(world_size)
    ]
    own = everyones[rank].clone().requires_grad_()
    probs = everyones[rank][:, 0].clone().requires_grad_()
    done = []
    received, received_probs = rows_to_parts((own, probs), route, meanwhile=lambda: done.append(True))
    assert done == [True]
    device = rank // num_parts
    pieces = [everyones[source].split(sent[source])[device] for source in sources]
    wanted = torch.cat(pieces)
    assert torch.equal(received.detach(), wanted)
    assert torch.equal(received_probs.detach(), wanted[:, 0])

    # Part x returns (x + 1) times the rows: the sum is X (X + 1) / 2 times as much, there and back.
    factor = num_parts * (num_parts + 1) / 2
    results = results_from_parts(received * (rank % num_parts + 1), route)
    assert torch.allclose(results, factor * everyones[rank])
    results.backward(torch.full_like(results, 2.0))
    assert torch.allclose(own.grad, torch.full_like(own, 2 * factor))
    received_probs.sum().backward()
    assert torch.allclose(probs.grad, torch.full_like(probs, float(num_parts)))
    return True


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_every_part_of_an_expert_gets_all_rows_and_results_are_summed(num_parts, empty):
    assert all(run_ranks(to_all_parts_and_back, 4, num_parts, empty))


def results_reach_everybody(rank, world_size, num_parts, num_peers, empty):
    num_devices = world_size // num_parts
    sent = rows_of(world_size, num_devices, empty)
    route, _ = route_of(rank, world_size, num_parts, sent)
    firsts = range(0, world_size, num_peers)
    peers, _ = dist.new_subgroups_by_enumeration([list(range(f, f + num_peers)) for f in firsts])
    members = dist.get_process_group_ranks(peers)
    shared = SharedRoute(
        route, peers, [sent[member] for member in members], [member // num_parts for member in members]
    )
    own = torch.arange(sum(sent[rank]) * WIDTH).view(-1, WIDTH).double() + 1000 * rank
    (received,) = rows_to_parts((own,), route)
    results = received * (rank % num_parts + 1)
    factor = num_parts * (num_parts + 1) / 2
    wanted = torch.cat(
        [factor * (torch.arange(sum(sent[m]) * WIDTH).view(-1, WIDTH).double() + 1000 * m) for m in members]
    )
    for simultaneous in (True, False):
        found = results_for_all((results, results[:, 0]), shared, simultaneous=simultaneous)
        assert torch.equal(found[0], wanted)
        assert torch.equal(found[1], wanted[:, 0])
    return True


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("num_parts", "num_peers"), [(1, 2), (2, 2), (2, 4), (1, 4), (4, 2)])
def test_every_rank_gets_all_results(num_parts, num_peers, empty):
    assert all(run_ranks(results_reach_everybody, 4, num_parts, num_peers, empty))


def misuse(rank, world_size):
    with pytest.raises(ValueError, match="wanted 2 ranks of the group"):
        ShardedRoute(dist.group.WORLD, 2, [1, 1], [1, 1])
    route = ShardedRoute(dist.group.WORLD, 1, [1, 1], [1, 1])
    with pytest.raises(ValueError, match="wanted its route's"):
        SharedRoute(route, dist.group.WORLD, [[1, 2], [1, 2]], [0, 1])
    return True


def test_routes_that_do_not_match_the_rows_are_refused():
    assert all(run_ranks(misuse, 2))


def common_tokens(rank, world_size):
    group = dist.group.WORLD
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    part = split_tokens(x, group)
    assert torch.equal(part.detach(), x.detach().chunk(world_size)[rank])
    whole = gather_tokens(part * (rank + 1), group)
    wanted = torch.cat([c * (r + 1) for r, c in enumerate(x.detach().chunk(world_size))])
    assert torch.equal(whole.detach(), wanted)
    whole.sum().backward()
    factors = torch.tensor([1.0, 1.0, 2.0, 2.0]).unsqueeze(1).expand(-1, 2)
    assert torch.equal(x.grad, factors), "the whole gradient on every rank"

    y = torch.ones(3, requires_grad=True)
    split_rows(y, [1, 2], group).sum().backward()
    assert torch.equal(y.grad, torch.ones(3))

    weight = torch.ones(2, requires_grad=True)
    (sum_gradient(weight, group) * (rank + 1)).sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), 3.0))

    z = torch.full((2,), rank + 1.0, requires_grad=True)
    total = sum_over(z, group)
    assert torch.equal(total.detach(), torch.full((2,), 3.0))
    (5 * total).sum().backward()
    assert torch.equal(z.grad, torch.full((2,), 5.0)), "what follows is the same on all ranks"

    w = torch.ones(1, requires_grad=True)
    scale_gradient(w, 0.5).sum().backward()
    assert float(w.grad) == 0.5
    return True


def test_gradients_of_tokens_that_several_ranks_hold_are_exact():
    assert all(run_ranks(common_tokens, 2))
