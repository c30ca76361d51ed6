"""Complete trainings of a BERT-MoE under every strategy: masked words and sentence order."""

from types import SimpleNamespace

import pytest

from megatron_fssdp.pretraining.pretrain_bert import _SUPPORTED
from megatron_fssdp.pretraining.script_parts import refuse_arguments

from ...training_run import BERT, slow, train_on_all_ranks
from .comparison import layouts
from .test_parity_matrix import compare
from .test_strategy_parity import compare_strategies

LAYOUTS = layouts(
    """
    biases_aux_loss_every_other_layer | 2 2 | --num-layers 4 --moe-layer-freq 2 {AUX_LOSS}
        --untie-embeddings-and-output-weights | slots=2 overlap_degree=3 FSSDP_CHECK_PLANS=1
        | num_iterations=3 reshard_interval=1
    copies_overlaps_recomputed | 4 2 | {OVERLAPS} {RECOMPUTE} {GATED} | slots=2 overlap_degree=3
    tensor_parallel_whole_experts_rope | 4 4 | {TP2} {WHOLE_EXPERTS} --position-embedding-type rope {SHARED}
        {NO_BIAS} | slots=2 overlap_degree=2
    pipeline_micro_batches | 4 2 | {PP2} --num-layers 4 --moe-layer-freq ([1]*3+[0]) {DISTRIBUTED} {BATCH16} |
        slots=2 overlap_degree=2 rematerialize=true
    interleaved_pipeline_overlaps_recomputed_moe | 4 2 | {INTERLEAVED} {OVERLAPS} {RECOMPUTE_MOE} {NO_BIAS} |
        slots=2 overlap_degree=2
    bf16_distributed_no_order_head | 4 2 | --bf16 {DISTRIBUTED} --bert-no-binary-head {NO_BIAS} | slots=2
        overlap_degree=2
    """
)
FIRST, *MORE = LAYOUTS


@pytest.mark.parametrize("name", [FIRST, *slow(MORE)])
def test_losses_equal_stock_megatron(name, sentence_data, tmp_path):
    compare(LAYOUTS[name], sentence_data, tmp_path, BERT, plain=name != FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_losses_of_every_strategy_equal_plain_expert_parallelism(name, sentence_data, tmp_path):
    compare_strategies(LAYOUTS[name], sentence_data, tmp_path, BERT)


def test_options_that_bert_would_ignore_are_refused(sentence_data):
    for name, value in (("qk_layernorm", True), ("rotary_base", 5000), ("position_embedding_type", "none")):
        with pytest.raises(SystemExit, match=f"--{name.replace('_', '-')}: got {value}, wanted "):
            refuse_arguments(SimpleNamespace(**{name: value}), _SUPPORTED, "")
    arguments = "--train-iters 1 --calculate-per-token-loss"
    (run,) = train_on_all_ranks(1, arguments, sentence_data, model=BERT)
    assert run.exit_code == 1
    assert not run.losses
