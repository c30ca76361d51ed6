"""Exchanges of all devices in one process: no token is lost, duplicated or sent to a wrong device."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy, plan_dispatch
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.arrival_order import ArrivalOrder
from megatron_fssdp.runtime.exchange.row_exchanges.megatron_exchange import MegatronExchange
from megatron_fssdp.runtime.exchange.selected_pairs import SelectedPairs
from megatron_fssdp.runtime.exchange.token_exchange import plan_exchange
from megatron_fssdp.testing.random_placement import random_placement
from tests.drawn_examples import examples


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 4, 6]),
    st.integers(1, 9),
    st.sampled_from(get_args(DispatchPolicy)),
)
@examples(120)
def test_every_assignment_is_computed_once_on_a_device_with_its_expert(
    seed: int, num_devices: int, num_experts: int, policy: DispatchPolicy
) -> None:
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, num_experts, num_devices)
    topology = Topology.uniform(num_devices, int(rng.choice([n for n in (1, 2) if num_devices % n == 0])))
    maps = [torch.from_numpy(rng.random((rng.integers(0, 9), num_experts)) < 0.4) for _ in range(num_devices)]
    counts_DE = np.stack([routing_map.sum(0).numpy() for routing_map in maps])
    dispatch = plan_dispatch(policy, counts_DE, placement, topology)
    records = [plan_exchange(SelectedPairs.of(maps[d]), [dispatch], placement, d) for d in range(num_devices)]
    # The collectives are played below, so no process groups are needed.
    exchanges = [MegatronExchange(None) for _ in records]  # type: ignore[arg-type]
    for exchange, record in zip(exchanges, records, strict=True):
        exchange.start(record, placement)

    # A row's hidden state is its origin (device, token), its probability names the expert.
    sent = []
    for d, (routing_map, record) in enumerate(zip(maps, records, strict=True)):
        num_tokens = len(routing_map)
        hidden = torch.stack([torch.full((num_tokens,), float(d)), torch.arange(num_tokens).float()], dim=1)
        expert = torch.arange(num_experts).float().expand(num_tokens, -1)
        rows, probs = exchanges[d].permute(hidden, expert)
        sent.append(torch.split(torch.cat([rows, probs.unsqueeze(1)], dim=1), list(record.send_D)))
    computed, returned = [], []
    for d, record in enumerate(records):
        assert [len(sent[source][d]) for source in range(num_devices)] == list(record.receive_D)
        received = torch.cat([sent[source][d] for source in range(num_devices)])
        arrivals = ArrivalOrder(record.received_SG, received.device)
        rows, experts = arrivals.sort_by_expert(received[:, :2], received[:, 2])
        present = placement.experts_on(d)
        assert experts.tolist() == np.repeat(present, record.rows_per_expert).tolist()
        computed += [(*row, e) for row, e in zip(rows.tolist(), experts.tolist(), strict=True)]
        back = arrivals.sort_by_source(rows)
        assert torch.equal(back, received[:, :2])
        returned.append(torch.split(torch.cat([back, experts.new_ones(len(back), 1)], 1), record.receive_D))
    wanted = [(d, t, e) for d, routing_map in enumerate(maps) for t, e in routing_map.nonzero().tolist()]
    assert sorted(computed) == wanted
    for d, routing_map in enumerate(maps):
        output = exchanges[d].unpermute(torch.cat([returned[s][d] for s in range(num_devices)]))
        num_choices = routing_map.sum(1)
        assert torch.equal(output[:, 2], num_choices.float()), "each token gets one result per expert"
        assert torch.equal(output[:, 1], num_choices * torch.arange(len(routing_map)).float())


@pytest.mark.gpu
def test_planning_an_exchange_never_makes_the_host_wait_for_the_device() -> None:
    rng = np.random.default_rng(1)
    placement = random_placement(rng, 8, 4)
    routing_map = torch.from_numpy(rng.random((64, 8)) < 0.3)
    counts_DE = np.repeat(routing_map.sum(0).numpy()[None], 4, axis=0)
    dispatch = plan_dispatch("balanced", counts_DE, placement, Topology.uniform(4, 1))
    on_device = routing_map.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        record = plan_exchange(SelectedPairs.of(on_device), [dispatch], placement, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reference = plan_exchange(SelectedPairs.of(routing_map), [dispatch], placement, 1)
    assert torch.equal(record.assignment_A.cpu(), reference.assignment_A)
