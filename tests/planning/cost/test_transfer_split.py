import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.transfer_split import TransferSplit, split_transfers


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        # Weights travel for 10 s: 6 s fit under attention and the other 4 s under 5 s of experts. Gradients
        # travel for 20 s: 12 s fit under attention and 8 s under 10 s of experts.
        ((10.0, 20.0), TransferSplit(0.4, 0.4)),
        ((6.0, 12.0), TransferSplit()),
        ((0.0, 0.0), TransferSplit()),
        # What no compute hides stays with attention.
        ((100.0, 0.0), TransferSplit(0.05, 0.0)),
    ],
)
def test_split_shares_equal_those_worked_out_by_hand(seconds, wanted) -> None:
    assert split_transfers(*seconds, non_expert_s=6.0, expert_s=5.0) == wanted


@given(
    gather_s=st.floats(0, 1e3),
    reduce_s=st.floats(0, 1e3),
    non_expert_s=st.floats(0, 1e3),
    expert_s=st.floats(0, 1e3),
)
def test_the_exposed_time_equals_equation_8(
    gather_s: float, reduce_s: float, non_expert_s: float, expert_s: float
) -> None:
    """Pro-Prophet, Eq. 8: the exposed time is the transfer minus both pieces of compute."""
    split = split_transfers(gather_s, reduce_s, non_expert_s=non_expert_s, expert_s=expert_s)
    for busy_s, share, factor in ((gather_s, split.gather, 1), (reduce_s, split.reduce, 2)):
        under_experts, between = share * busy_s, (1 - share) * busy_s
        exposed = max(0, under_experts - factor * expert_s) + max(0, between - factor * non_expert_s)
        wanted = max(0, busy_s - factor * (non_expert_s + expert_s))
        assert exposed == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_outside_0_to_1_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="wanted a share"):
        TransferSplit(gather=share)
