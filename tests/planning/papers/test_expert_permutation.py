import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.papers.expert_permutation import check_exchangeable, permuted_owners
from megatron_fssdp.planning.placement.placement import even_owners


def test_hot_experts_go_to_different_devices() -> None:
    """Loads are 8, 7 | 2, 1: the 8 stays, the 7 and the 2 go to the other device, the 1 fills the first."""
    assert permuted_owners(even_owners(4, 2), np.array([8, 7, 2, 1]), 2).tolist() == [0, 1, 1, 0]


def test_among_equal_devices_the_present_owner_keeps_its_expert() -> None:
    owners = np.array([1, 0, 1, 0])
    assert permuted_owners(owners, np.array([5, 5, 1, 1]), 2).tolist() == owners.tolist()


@given(seed=st.integers(0, 10_000), per_device=st.integers(2, 4))
def test_every_device_keeps_its_number_of_experts(seed: int, per_device: int) -> None:
    rng = np.random.default_rng(seed)
    owners = rng.permutation(even_owners(4 * per_device, 4))
    new_E = permuted_owners(owners, rng.gamma(0.5, 10, 4 * per_device), 4)
    assert np.bincount(new_E, minlength=4).tolist() == [per_device] * 4


@pytest.mark.parametrize("owners", [even_owners(4, 4), np.array([0, 0, 0, 1]), np.zeros(4, np.int64)])
def test_owners_that_no_exchange_can_balance_are_refused(owners: np.ndarray) -> None:
    num_devices = max(int(owners.max()) + 1, 2)
    with pytest.raises(ValueError, match="experts: wanted two or more on each, equally many"):
        check_exchangeable(owners, num_devices)
    check_exchangeable(np.zeros(1, np.int64), 1)
