"""Parameter counts equal those worked out by hand and those of the papers' tables."""

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


def changed(**keys: object) -> ModelArguments:
    return ModelArguments.model_validate({**TINY.model_dump(), **keys})


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


def test_dense_layers_shared_experts_and_gated_activations_are_counted() -> None:
    count = count_parameters(
        changed(
            moe_layer_freq=(0, 1),
            ffn_hidden_size=20,
            moe_ffn_hidden_size=6,
            moe_shared_expert_intermediate_size=12,
            swiglu=True,
            untie_embeddings_and_output_weights=True,
        ),
        10,
    )
    assert count.layer_matrices == 2 * ATTENTION + 3 * 8 * 20 + 3 * 8 * 12 + GATE
    assert count.expert_matrices == 4 * 3 * 8 * 6
    assert count.outside_layers == 80 + 80


def test_grouped_heads_of_another_width_with_norms_are_counted() -> None:
    keys = {"group_query_attention": True, "kv_channels": 6, "qk_layernorm": True, "normalization": "RMSNorm"}
    count = count_parameters(changed(**keys), 10)
    assert count.layer_matrices == 2 * (8 * (2 * 12 + 2 * 6) + GATE)
    assert count.small == 2 * (2 * 8 + 2 * 6) + 8


def test_biases_and_positions_are_counted() -> None:
    mixed = {"moe_layer_freq": (0, 1)}
    count = count_parameters(
        changed(add_bias_linear=True, position_embedding_type="learned_absolute", **mixed), 10
    )
    plain = count_parameters(changed(**mixed), 10)
    assert count.outside_layers == (10 + 4) * 8
    assert count.idle == 2 * (EXPERT + 32 + 8)
    # Queries, keys, values and results of both layers, a dense feed-forward layer, a gate, experts.
    assert count.small - plain.small == 2 * 4 * 8 + (32 + 8) + 4 + 4 * (32 + 8)
    assert count.layer_matrices == plain.layer_matrices


def test_berts_segments_and_two_loss_heads_are_counted() -> None:
    gpt, bert = count_parameters(TINY, 10), count_parameters(changed(family="bert"), 10)
    words = (8 * 8 + 8) + 2 * 8 + 10  # a dense layer, its norm, the output layer's biases
    order = (8 * 8 + 8) + (2 * 8 + 2)
    assert bert.total - gpt.total == bert.outside_layers - gpt.outside_layers == 2 * 8 + words + order
    without = count_parameters(changed(family="bert", bert_binary_head=False), 10)
    assert without.total - gpt.total == words
