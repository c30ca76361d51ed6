"""Parts of a count equal those worked out by hand; ``test_shipped_models.py`` compares sums with Megatron."""

from megatron_fssdp.config.run.sections import ModelArguments
from megatron_fssdp.simulation.parameter_count import count_parameters

TINY = ModelArguments(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    seq_length=4,
    num_experts=4,
    add_bias_linear=False,
    position_embedding_type="rope",
)


ATTENTION, GATE, EXPERT = 4 * 8 * 8, 8 * 4, 2 * 8 * 32
NORMS = 2 * (2 * 2 + 1) * 8  # weight and bias of two norms a layer, and the last


def test_parameters_of_a_plain_model_are_counted() -> None:
    count = count_parameters(TINY, 10)
    assert count.layer_matrices == 2 * (ATTENTION + GATE)
    assert count.expert_matrices == 2 * 4 * EXPERT
    assert count.idle == 2 * 2 * EXPERT
    assert count.outside_layers == 10 * 8
    assert count.small == NORMS
    assert count.multi_token_prediction == 0
    assert count.total == 2 * (ATTENTION + GATE) + 2 * 4 * EXPERT + 10 * 8 + NORMS
    assert count.total - count.activated == count.idle
