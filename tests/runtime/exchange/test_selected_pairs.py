"""The order of sending, for random routing maps and splits of each expert's pairs.

Shape letters: T tokens, E experts, D devices.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.runtime.exchange.chunk_permutation import transposed_order
from megatron_fssdp.runtime.exchange.selected_pairs import SelectedPairs, true_positions
from megatron_fssdp.testing.virtual_cuda import virtual_cuda
from tests.drawn_examples import examples


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 3))
@examples(60)
def test_true_positions_are_the_indices_of_true_values(mask: list[bool], more: int) -> None:
    size = min(sum(mask) + more, len(mask))
    wanted = [i for i, value in enumerate(mask) if value]
    assert true_positions(torch.tensor(mask, dtype=torch.bool), size).tolist() == wanted


def test_true_positions_on_cuda_have_a_fixed_length() -> None:
    rng = np.random.default_rng(0)
    with virtual_cuda() as device:
        for num_entries, share in ((0, 0.0), (1, 1.0), (30, 0.0), (30, 0.3), (30, 1.0)):
            mask = rng.random(num_entries) < share
            wanted = np.flatnonzero(mask).tolist()
            on_device = torch.from_numpy(mask).cuda()
            for size in (len(wanted), num_entries):
                got = true_positions(on_device, size)
                assert device.holds(got)
                assert got.tolist() == wanted + [0] * (size - len(wanted))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 6), st.booleans())
@examples(80)
def test_pairs_go_by_device_then_expert_then_token(
    seed: int, num_devices: int, num_experts: int, is_bounded: bool
) -> None:
    rng = np.random.default_rng(seed)
    routing_TE = rng.random((rng.integers(0, 8), num_experts)) < rng.choice([0.2, 0.5, 1.0])
    shares = rng.dirichlet(np.ones(num_devices), num_experts)
    send_ED = np.array([rng.multinomial(n, p) for n, p in zip(routing_TE.sum(axis=0), shares, strict=True)])
    most_pairs = int(routing_TE.sum()) + int(rng.integers(3)) if is_bounded else None
    pairs = SelectedPairs.of(torch.from_numpy(routing_TE), most_pairs)
    tokens, assignments = pairs.to_send(send_ED.reshape(-1), transposed_order(num_experts, num_devices))
    wanted = []
    for device in range(num_devices):
        for expert in range(num_experts):
            begin = send_ED[expert, :device].sum()
            chosen = np.flatnonzero(routing_TE[:, expert])[begin : begin + send_ED[expert, device]]
            wanted += [(token, token * num_experts + expert) for token in chosen.tolist()]
    assert list(zip(tokens.tolist(), assignments.tolist(), strict=True)) == wanted


def test_more_pairs_than_announced_are_an_error() -> None:
    routing_map = torch.ones(3, 2, dtype=torch.bool)
    with virtual_cuda():
        for of_device in (routing_map, routing_map.cuda()):
            pairs = SelectedPairs.of(of_device, most_pairs=3)
            with pytest.raises(RuntimeError, match="got 6 pairs of tokens and experts, wanted at most 3"):
                pairs.to_send(np.full(2, 3), np.arange(2))
