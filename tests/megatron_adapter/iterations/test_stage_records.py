import pytest
import torch

from megatron_fssdp.megatron_adapter.iterations.stage_records import IterationFacts

GIVEN = {"num_microbatches": 2, "micro_batch_size": 3, "seq_length": 8}
ONE = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("returned", "loss"),
    [
        pytest.param({"lm loss": ONE}, (4.0, 2.0), id="a mean of each micro-batch"),
        pytest.param({"lm loss": torch.tensor([6.0, 3.0])}, (12.0, 6.0), id="a sum with its tokens"),
        pytest.param({"lm loss": (torch.tensor(6.0), 3)}, (12.0, 6.0), id="the same as a pair"),
        pytest.param({"loss": 2.0}, (4.0, 2.0), id="a number"),
        pytest.param({"keys": ["loss", "kl"], "values": ONE}, None, id="names first, as slime"),
        pytest.param({"log_probs": [torch.zeros(3), torch.zeros(3)]}, None, id="tensors of samples"),
        pytest.param({"log_probs": [torch.zeros(3), [1.0]]}, None, id="lists of samples"),
        pytest.param({"log_probs": torch.zeros(7)}, None, id="a tensor of tokens"),
        pytest.param({"log_probs": None}, None, id="nothing"),
        pytest.param({}, None, id="an empty dictionary"),
        pytest.param([ONE], None, id="no dictionary"),
    ],
)
def test_a_loss_is_what_a_loop_returns_first_and_anything_else_is_the_loops_own(returned, loss):
    facts = IterationFacts()
    facts.note([returned, returned], GIVEN)
    assert facts.loss == loss


@pytest.mark.parametrize("results", [None, [], torch.zeros(2)])
def test_a_schedule_may_return_no_losses(results):
    facts = IterationFacts()
    facts.note(results, GIVEN)
    assert facts.loss is None
    assert (facts.num_sequences, facts.seq_length) == (6, 8)


def test_sizes_that_a_schedule_does_not_read_may_be_none():
    facts = IterationFacts()
    facts.note([], GIVEN | {"micro_batch_size": None, "seq_length": None})
    assert (facts.num_sequences, facts.seq_length) == (0, 0)
