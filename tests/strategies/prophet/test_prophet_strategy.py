import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.strategies.prophet.prophet_strategy import ProphetModel, greedy_placements

# Pro-Prophet's Fig. 6: 5, 2 and 2 inputs are for the experts of devices 0, 1 and 2. Device 1 has two for
# expert 0, device 2 has none for it and one for each of the others.
FIGURE_6 = np.array([[3, 0, 0], [2, 1, 0], [0, 1, 2]])
OWNERS = even_owners(3, 3)
# An input takes a second to send and one to compute; an expert takes 0.3 s for each device of three.
MODEL = ProphetModel(
    num_devices=3, input_bytes=1, expert_bytes=0.3, gradient_bytes=0.6, bytes_per_s=1, inputs_per_s=1
)


def plan(owner_E, counts_DE, model, num_left_out, *, balance=0.5, slots=99):
    (placement,) = greedy_placements(owner_E, counts_DE, model, [num_left_out], balance=balance, slots=slots)
    return placement


def layer_s(model, counts_DE, placement, num_left_out):
    """Eq. 6 or 8 for a placement, from what each device computes and receives."""
    stays_DE = np.where(placement.present_ED.T, counts_DE, 0)
    away_E = (counts_DE - stays_DE).sum(axis=0)
    received_D = np.bincount(placement.owner_E, weights=away_E, minlength=model.num_devices)
    sent = np.count_nonzero(placement.present_ED.sum(axis=1) > 1)
    computed_D = stays_DE.sum(axis=1) + received_D
    return float(model.layer_s(received_D.max(), computed_D.max(), sent, num_left_out))


def test_equations_give_the_seconds_worked_out_by_hand():
    assert MODEL.all_to_all_s(2) == 2  # Eq. 1
    assert MODEL.expert_s(5) == 5  # Eq. 2
    assert MODEL.transfer_s(2, 3, 1) == pytest.approx(2 * 2 / 3 * 3)  # Eq. 4, 5
    assert MODEL.layer_s(2, 5, 1, 1) == pytest.approx(4 * 2 + 3 * 5 + 0.2 + 0.4)  # Eq. 6
    overlapped = dataclasses.replace(MODEL, overlaps=True, expert_bytes=30, gradient_bytes=60, non_expert_s=4)
    # Eq. 8: 20 s of Trans minus 5 + 4, and 40 s of Agg minus twice that.
    assert overlapped.layer_s(2, 5, 1, 1) == pytest.approx(4 * 2 + 3 * 5 + 11 + 22)


def test_figure_6_of_fastermoe_is_balanced():
    """Expert 0 goes to device 1 only, which has inputs for it and then 4 in total; expert 1 to device 2."""
    planned = plan(OWNERS, FIGURE_6, MODEL, 1)
    assert [planned.holders(expert) for expert in range(3)] == [(0, 1), (1, 2), (2,)]
    once = plan(OWNERS, FIGURE_6, MODEL, 1, balance=0.8)
    assert [once.holders(expert) for expert in range(3)] == [(0, 1), (1,), (2,)]
    assert layer_s(MODEL, FIGURE_6, once, 1) == pytest.approx(4 * 1 + 3 * 4 + 0.2 + 0.4)


def test_the_search_returns_its_best_step_and_not_its_last():
    dear = dataclasses.replace(MODEL, expert_bytes=30, gradient_bytes=30)
    assert plan(OWNERS, FIGURE_6, dear, 1, balance=0.0).num_replicas == 0


def test_a_first_step_that_does_not_pay_does_not_end_the_search():
    """Two devices are equally busy: relieving only one lowers no maximum and costs a transfer."""
    model = dataclasses.replace(MODEL, num_devices=4)
    planned = plan(even_owners(4, 4), np.array([[2, 2, 0, 0]] * 4), model, 0)
    assert sorted(np.flatnonzero(planned.present_ED.sum(axis=1) == 4)) == [0, 1]


@given(
    seed=st.integers(0, 10_000),
    num_left_out=st.integers(0, 3),
    expert_bytes=st.sampled_from([0.1, 5.0, 200.0]),
    overlaps=st.booleans(),
    balance=st.sampled_from([0.0, 0.5, 2.0]),
    slots=st.sampled_from([1, 2, 99]),
)
def test_a_plan_never_takes_longer_than_doing_nothing(
    seed, num_left_out, expert_bytes, overlaps, balance, slots
):
    rng = np.random.default_rng(seed)
    counts_DE = rng.poisson(rng.gamma(0.4, 20, 8), (4, 8))
    model = ProphetModel(4, 1.0, expert_bytes, expert_bytes, 1.0, 2.0, 3.0, overlaps)
    planned = plan(even_owners(8, 4), counts_DE, model, num_left_out, balance=balance, slots=slots)
    assert planned.replicas_per_device_D.max() <= slots
    plain = ExpertPlacement.owners_only(even_owners(8, 4), 4)
    plain_s = layer_s(model, counts_DE, plain, num_left_out)
    assert layer_s(model, counts_DE, planned, num_left_out) <= plain_s + 1e-9
