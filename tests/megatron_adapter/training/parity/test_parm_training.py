"""Complete trainings under Parm's schedules through Megatron's command line: losses equal stock Megatron's.

Megatron itself trains these layouts with sequence parallelism only; without it losses are the same.
"""

from dataclasses import replace

import pytest

from megatron_fssdp.records.metrics import read_metrics

from ...training_run import HALF, assert_close
from .comparison import layouts, trained

SCHEDULES = [f"parm schedule={name}" for name in ("baseline", "megatron", "s1", "s2", "auto")]
FSSDP = "fssdp slots=2 overlap_degree=3 reshard_interval=3"

LAYOUTS = layouts(
    """
    parts | 4 2 | {PARTS} {Z_LOSS}
    whole_experts | 4 4 | {WHOLE} {AUX_LOSS} --moe-router-load-balancing-type seq_aux_loss {BATCH16} {NO_BIAS}
    biases | 4 4 | {WHOLE} {BATCH16} --make-vocab-size-divisible-by 2
    pipeline_overlaps | 8 2 | {PARTS} {PP2} {OVERLAPS} --swiglu {BATCH16}
    interleaved_recomputed | 4 1 | {PARTS} {INTERLEAVED} {RECOMPUTE} {Z_LOSS}
    tp4_copies_shared | 4 2 | --tensor-model-parallel-size 4 {WHOLE_EXPERTS} {NO_BIAS} {SHARED} {DISTRIBUTED}
    top1_bf16_recomputed | 4 2 | {PARTS} --bf16 {TOP1} {RECOMPUTE_MOE} --swiglu
    expert_bias | 4 2 | {PARTS} {EXPERT_BIAS} {Z_LOSS}
    per_token_loss | 4 2 | {PARTS} --calculate-per-token-loss {Z_LOSS} {BATCH16}
    ep1 | 2 1 | {PARTS}
    """
)
# What stock Megatron needs beside the arguments. With sequence parallelism, Megatron 0.19 sums the biases'
# gradients of different experts. The vocabulary is padded as on two ranks: padded words count in the softmax.
STOCK = {"biases": "--tensor-model-parallel-size 1 --make-vocab-size-divisible-by 4"}


def test_losses_equal_stock_megatron(text_data, tmp_path):
    _compare("parts", text_data, tmp_path, ["parm schedule=s2"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_stock_megatron_in_more_layouts(name, text_data, tmp_path):
    _compare(name, text_data, tmp_path, [*SCHEDULES, FSSDP], 20)


def test_the_selected_schedule_is_logged_and_recorded(text_data, tmp_path):
    layout = replace(LAYOUTS["parts"], num_iterations=2)
    run = trained(layout, f"parm record_dir={tmp_path}", text_data)
    (message,) = {text for text in run.messages if "] schedule " in text}
    metrics = read_metrics(tmp_path)
    assert len(metrics) == 2
    for layer in metrics[-1].layers:
        assert set(layer.schedule_predicted_s) == {"s1", "s2", "megatron"}
        assert layer.schedule == min(layer.schedule_predicted_s, key=layer.schedule_predicted_s.__getitem__)
        assert f"schedule {layer.schedule} " in message


def test_sequences_that_ranks_cannot_divide_have_schedule_s2(text_data):
    arguments = f"{LAYOUTS['parts'].arguments} --seq-length 15 --max-position-embeddings 15"
    odd = replace(LAYOUTS["parts"], num_iterations=1, arguments=arguments)
    run = trained(odd, "parm", text_data)
    assert any("schedule s2 " in message for message in run.messages)


def _compare(name, data, folder, strategies, num_iterations):
    def lengthened(more, iterations):
        layout = LAYOUTS[name]
        return replace(layout, arguments=f"{layout.arguments} {more}", num_iterations=iterations)

    stock = STOCK.get(name, "--sequence-parallel")
    # Megatron initializes weights differently under sequence parallelism, so all runs load one checkpoint.
    save = f"--save {folder} --save-interval 1 --ckpt-format torch_dist"
    trained(lengthened(f"{stock} {save}", 1), "none", data)
    load = f"--load {folder} --finetune --no-load-optim --no-load-rng"
    wanted = trained(lengthened(f"{load} {stock}", num_iterations), "none", data)
    for strategy in strategies:
        run = trained(lengthened(load, num_iterations), strategy, data)
        assert_close(run, wanted, *(HALF if LAYOUTS[name].is_half else ()))
