import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.megatron_adapter.routing.topology_aware_gate import select_experts

NEAR = torch.tensor([True, True, False, False])


def test_choices_equal_those_worked_out_by_hand() -> None:
    """Tokens 0 to 2 prefer experts 2 or 3, which are far; only the one with the best score can leave."""
    fit_TE = torch.tensor(
        [
            [0.1, 0.2, 0.6, 0.1],  # wants 2 by 0.6
            [0.1, 0.0, 0.1, 0.8],  # wants 3 by 0.8: goes
            [0.3, 0.2, 0.5, 0.0],  # wants 2 by 0.5
            [0.7, 0.1, 0.1, 0.1],  # stays by itself
        ]
    )
    assert select_experts(fit_TE, 1, NEAR, 1).tolist() == [[1], [3], [0], [0]]
    # Second choices: tokens 0 and 2 still prefer expert 2, with 0.6 and 0.5; one of them leaves.
    assert select_experts(fit_TE, 2, NEAR, 1).tolist() == [[1, 2], [3, 0], [0, 1], [0, 1]]


def test_without_a_limit_on_leaving_tokens_the_choice_is_plain_top_k() -> None:
    fit_TE = torch.rand(50, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(select_experts(fit_TE, 2, NEAR, 50), fit_TE.topk(2, dim=1).indices)


def test_equal_scores_prefer_the_lowest_expert() -> None:
    fit_TE = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(3, 1)
    assert select_experts(fit_TE, 1, NEAR, 2).tolist() == [[2], [2], [0]]


@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(1, 3),
    most_leaving=st.integers(0, 40),
    few_values=st.booleans(),
)
def test_the_allowed_number_of_tokens_leaves_and_no_expert_is_chosen_twice(
    seed: int, top_k: int, most_leaving: int, few_values: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    is_near_E = torch.zeros(8, dtype=torch.bool)
    is_near_E[torch.randperm(8, generator=generator)[: 3 + seed % 6]] = True
    fit_TE = torch.rand(30, 8, generator=generator)
    if few_values:
        fit_TE = (4 * fit_TE).round()
    selected_TK = select_experts(fit_TE, top_k, is_near_E, most_leaving)
    is_taken_TE = torch.zeros_like(fit_TE, dtype=torch.bool)
    for choice in range(top_k):
        selected_T = selected_TK[:, choice]
        assert not is_taken_TE.gather(1, selected_T[:, None]).any(), "an expert was chosen twice"
        open_TE = fit_TE.masked_fill(is_taken_TE, -1.0)
        best_T = open_TE.amax(dim=1)
        fit_T = fit_TE.gather(1, selected_T[:, None])[:, 0]
        # Ties between near and far experts go to the lower number, so this test does the same.
        wants_T = ~is_near_E[(open_TE == best_T[:, None]).int().argmax(dim=1)]
        leaves_T = ~is_near_E[selected_T]
        assert leaves_T.sum() == min(most_leaving, int(wants_T.sum()))
        stays_T = wants_T & ~leaves_T
        if stays_T.any() and leaves_T.any():
            assert best_T[leaves_T].min() >= best_T[stays_T].max(), "a token with a lower score left"
        nearest_T = open_TE.masked_fill(~is_near_E, -1.0).amax(dim=1)
        assert (fit_T == torch.where(stays_T, nearest_T, best_T)).all()
        is_taken_TE[torch.arange(30), selected_T] = True


def test_too_few_near_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="has 2 experts in this rank's node, wanted at least the 3"):
        select_experts(torch.rand(5, 4), 3, NEAR, 1)


def test_with_one_leaving_choice_the_other_choices_stay() -> None:
    fit_TE = torch.tensor(
        [
            [0.1, 0.2, 0.6, 0.1],  # wants 2 by 0.6: may not
            [0.0, 0.1, 0.1, 0.8],  # wants 3 by 0.8: goes, and its second choice is near
            [0.6, 0.0, 0.4, 0.0],  # stays, and so does its second choice, which would be 2
        ]
    )
    assert select_experts(fit_TE, 2, NEAR, 1, "one").tolist() == [[1, 0], [3, 1], [0, 1]]
    # Two tokens want to leave with their best choice, and two may: nothing is limited.
    assert select_experts(fit_TE, 2, NEAR, 2, "one").tolist() == [[2, 1], [3, 1], [0, 2]]


@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 3), most_leaving=st.integers(0, 40))
def test_one_leaving_choice_keeps_its_limit(seed: int, top_k: int, most_leaving: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    is_near_E = torch.zeros(8, dtype=torch.bool)
    is_near_E[torch.randperm(8, generator=generator)[: 3 + seed % 6]] = True
    fit_TE = torch.rand(30, 8, generator=generator)
    selected_TK = select_experts(fit_TE, top_k, is_near_E, most_leaving, "one")
    assert all(len(set(row)) == top_k for row in selected_TK.tolist())
    best_TK = fit_TE.topk(top_k, dim=1).indices
    wants_T = ~is_near_E[best_TK[:, 0]]
    if wants_T.sum() <= most_leaving:
        assert torch.equal(selected_TK, best_TK)
        return
    leaves_TK = ~is_near_E[selected_TK]
    assert leaves_TK.sum() == most_leaving
    leaves_T = leaves_TK.any(dim=1)
    highest_T = fit_TE.amax(dim=1)
    if most_leaving:
        assert highest_T[leaves_T].min() >= highest_T[wants_T & ~leaves_T].max()
        assert torch.equal(selected_TK[leaves_T, 0], best_TK[leaves_T, 0])
    near_TK = fit_TE.masked_fill(~is_near_E, -1.0).topk(top_k, dim=1).indices
    assert torch.equal(selected_TK[~leaves_T], near_TK[~leaves_T])
