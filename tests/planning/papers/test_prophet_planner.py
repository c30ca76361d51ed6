import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.papers.prophet_model import ProphetModel
from megatron_fssdp.planning.papers.prophet_planner import plan_layers
from megatron_fssdp.planning.placement.placement import even_owners

# Pro-Prophet's Fig. 6: 5, 2 and 2 inputs are for the experts of devices 0, 1 and 2. Device 1 has two for
# expert 0, device 2 has none for it and one for each of the others.
FIGURE_6 = np.array([[3, 0, 0], [2, 1, 0], [0, 1, 2]])
OWNERS = even_owners(3, 3)
# An input takes a second to send and one to compute; an expert takes 0.3 s for each device of three.
MODEL = ProphetModel(
    num_devices=3,
    input_bytes=1,
    expert_bytes=0.3,
    gradient_bytes=0.6,
    bytes_per_s=1,
    inputs_per_s=1,
)


def test_equations_give_the_seconds_worked_out_by_hand() -> None:
    received_D, computed_D = np.array([2, 1, 0]), np.array([5, 2, 2])
    assert MODEL.all_to_all_s(received_D) == 2  # Eq. 1
    assert MODEL.expert_s(computed_D) == 5  # Eq. 2
    assert MODEL.transfer_s(2, 3, 1) == pytest.approx(2 * 2 / 3 * 3)  # Eq. 4, 5
    assert MODEL.layer_s(received_D, computed_D, 1, 1) == pytest.approx(4 * 2 + 3 * 5 + 0.2 + 0.4)  # Eq. 6
    overlapped = dataclasses.replace(MODEL, overlaps=True, expert_bytes=30, gradient_bytes=60, non_expert_s=4)
    # Eq. 8: 20 s of Trans minus 5 + 4, and 40 s of Agg minus twice that.
    assert overlapped.layer_s(received_D, computed_D, 1, 1) == pytest.approx(4 * 2 + 3 * 5 + 11 + 22)


def test_figure_6_of_fastermoe_is_balanced() -> None:
    """Expert 0 goes to device 1 only, which has inputs for it and then 4 in total; expert 1 to device 2."""
    ((planned, planned_s),) = plan_layers(OWNERS, FIGURE_6, MODEL, [1])
    assert [planned.holders(expert) for expert in range(3)] == [(0, 1), (1, 2), (2,)]
    assert planned_s == pytest.approx(3 * 3 + 2 * (0.2 + 0.4))  # each device computes 3 inputs and sends none
    ((once, once_s),) = plan_layers(OWNERS, FIGURE_6, MODEL, [1], balance=0.8)
    assert [once.holders(expert) for expert in range(3)] == [(0, 1), (1,), (2,)]
    assert once_s == pytest.approx(4 * 1 + 3 * 4 + 0.2 + 0.4)


def test_the_search_returns_its_best_step_and_not_its_last() -> None:
    dear = dataclasses.replace(MODEL, expert_bytes=30, gradient_bytes=30)
    ((planned, planned_s),) = plan_layers(OWNERS, FIGURE_6, dear, [1], balance=0.0)
    assert planned.num_replicas == 0
    assert planned_s == 4 * 2 + 3 * 5


def test_a_first_step_that_does_not_pay_does_not_end_the_search() -> None:
    """Two devices are equally busy: relieving only one lowers no maximum and costs a transfer."""
    counts_DE = np.array([[2, 2, 0, 0]] * 4)
    model = dataclasses.replace(MODEL, num_devices=4)
    ((planned, _),) = plan_layers(even_owners(4, 4), counts_DE, model, [0])
    assert sorted(np.flatnonzero(planned.present_ED.sum(axis=1) == 4)) == [0, 1]


def test_no_device_holds_more_than_its_slots() -> None:
    counts_DE = np.array([[9, 9, 0, 0]] * 4)
    model = dataclasses.replace(MODEL, num_devices=4)
    ((placement, _),) = plan_layers(even_owners(4, 4), counts_DE, model, [0], slots=1)
    assert placement.replicas_per_device_D.max() == 1


@given(
    seed=st.integers(0, 10_000),
    num_left_out=st.integers(0, 3),
    expert_bytes=st.sampled_from([0.1, 5.0, 200.0]),
    overlaps=st.booleans(),
    balance=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_a_plan_never_takes_longer_than_doing_nothing(
    seed: int, num_left_out: int, expert_bytes: float, overlaps: bool, balance: float
) -> None:
    rng = np.random.default_rng(seed)
    counts_DE = rng.poisson(rng.gamma(0.4, 20, 8), (4, 8))
    owners = even_owners(8, 4)
    model = ProphetModel(4, 1.0, expert_bytes, expert_bytes, 1.0, 2.0, 3.0, overlaps)
    ((planned, planned_s),) = plan_layers(owners, counts_DE, model, [num_left_out], balance=balance)

    def layer_s(present_ED: np.ndarray) -> float:
        stays_DE = np.where(present_ED.T, counts_DE, 0)
        away_E = (counts_DE - stays_DE).sum(axis=0)
        received_D = np.bincount(owners, weights=away_E, minlength=4)
        sent = np.count_nonzero(present_ED.sum(axis=1) > 1)
        return model.layer_s(received_D, stays_DE.sum(axis=1) + received_D, sent, num_left_out)

    plain_ED = np.zeros_like(planned.present_ED)
    plain_ED[np.arange(8), owners] = True
    assert planned_s <= layer_s(plain_ED) + 1e-9
    if num_left_out < 3:  # otherwise a selected expert goes to no device but still counts
        assert planned_s == pytest.approx(layer_s(planned.present_ED))


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_left_out is 3 of 3 devices"):
        plan_layers(OWNERS, FIGURE_6, MODEL, [3])
    with pytest.raises(ValueError, match="balance is -1"):
        plan_layers(OWNERS, FIGURE_6, MODEL, [1], balance=-1)
