"""Tokens exchange their devices: each holder keeps its number of tokens, and fewer copies travel."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fssdp.planning.dispatch.even_dispatch import EvenDispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.gathered_choices import gathered_devices
from megatron_fssdp.runtime.exchange.selected_pairs import SelectedPairs

EXPERTS, DEVICES, NODES = 16, 8, 4
TOPOLOGY = Topology.uniform(DEVICES, NODES)
NODE_D = torch.tensor(TOPOLOGY.node_of_device)


def drawn(
    seed: int, num_tokens: int, top_k: int, source: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token, expert and device of every pair of one source under even dispatch of a random placement."""
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((num_tokens, EXPERTS)), axis=1)[:, :top_k]
    routing = np.zeros((num_tokens, EXPERTS), bool)
    routing[np.arange(num_tokens)[:, None], chosen] = True
    owner_E = even_owners(EXPERTS, DEVICES)
    placement = ExpertPlacement.owners_only(owner_E, DEVICES).with_replicas(
        [(e, d) for e in range(EXPERTS) for d in range(DEVICES) if d != owner_E[e] and rng.random() < 0.2]
    )
    counts_DE = np.zeros((DEVICES, EXPERTS), np.int64)
    counts_DE[source] = routing.sum(axis=0)
    rows = EvenDispatch(counts_DE, placement, TOPOLOGY).rows_from(source)
    token, assignment = SelectedPairs.of(torch.from_numpy(routing)).token_and_assignment
    device = torch.from_numpy(np.repeat(rows.device_P, rows.tokens_P))
    return token, assignment % EXPERTS, device


def num_copies(token: torch.Tensor, number: torch.Tensor) -> int:
    return len({*zip(token.tolist(), number.tolist(), strict=True)})


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_tokens=st.integers(0, 40),
    top_k=st.sampled_from([1, 2, 4, 8]),
    source=st.integers(0, DEVICES - 1),
    num_empty=st.integers(0, 3),
)
def test_holders_keep_their_numbers_of_tokens(
    seed: int, num_tokens: int, top_k: int, source: int, num_empty: int
) -> None:
    token, expert, device = drawn(seed, num_tokens, top_k, source)
    empty = torch.zeros(num_empty, dtype=torch.int64)
    token_A, expert_A, device_A = (
        torch.cat(x) for x in ((token, empty), (expert, empty), (device, empty - 1))
    )
    gathered = gathered_devices(token_A, expert_A, device_A, NODE_D, num_tokens or 1, EXPERTS)
    assert (gathered[len(token) :] == -1).all()
    for place in (device, gathered[: len(token)]):
        loads = torch.zeros(EXPERTS, DEVICES, dtype=torch.int64)
        loads.index_put_((expert, place), torch.tensor(1), accumulate=True)
        if place is device:
            wanted = loads
    assert torch.equal(loads, wanted)


def test_fewer_copies_travel() -> None:
    before = after = 0
    for seed in range(20):
        token, expert, device = drawn(seed, 200, 4, seed % DEVICES)
        gathered = gathered_devices(token, expert, device, NODE_D, 200, EXPERTS)
        before += num_copies(token, NODE_D[device])
        after += num_copies(token, NODE_D[gathered])
    assert after < 0.97 * before
