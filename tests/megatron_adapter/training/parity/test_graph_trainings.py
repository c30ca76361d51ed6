"""Trainings with CUDA graphs of Megatron's loop. A CPU has none, so a replay runs what the graph contains."""

import pytest
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer import cuda_graphs, transformer_layer
from megatron.training import initialize

from megatron_fssdp.records.metrics import read_metrics

from ...training_run import assert_close, note, slow, train, wrap

GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1 --cuda-graph-modules"
LAYOUT = "{EP2} --train-iters 3"
# Modules in graphs, and the strategy.
FIRST = ("attn moe_router", "fssdp slots=2")
MORE = [("moe_router", "fssdp slots=2 rematerialize=true"), ("attn", "fssdp")]


@pytest.mark.parametrize("case", [FIRST, *slow(MORE)], ids=" under ".join)
def test_losses_equal_those_without_graphs(case, text_data, tmp_path):
    modules, strategy = case
    stock = train(2, LAYOUT, text_data, strategy="none")
    arguments = f"{LAYOUT} {GRAPHS} {modules}"
    run = train(2, arguments, text_data, strategy=f"{strategy} record_dir={tmp_path}", before=replay_on_cpu)
    assert_close(run, stock)
    assert len(run.notes) == 2 * 2 * 2 * 2  # ranks, iterations with graphs, layers, micro-batches
    assert all(any(layer.num_replicas for layer in entry.layers) for entry in read_metrics(tmp_path)[1:])


def replay_on_cpu():
    """Take the place of Transformer Engine's graphs, with its conditions on what it captures."""

    def graph_of(layer):
        assert not {**layer._forward_hooks, **layer._forward_pre_hooks, **layer._backward_hooks}

        def replay(*args, **kwargs):
            note("replay")
            cuda_graphs._set_capture_start()
            try:
                return layer._te_cuda_graph_capture(*args, **kwargs)
            finally:
                cuda_graphs._set_capture_end()

        replay.reset = lambda: None
        return replay

    def sample(helper):
        helper.num_microbatches = get_num_microbatches()
        return None, {"times": helper.num_microbatches}

    given = lambda layer, *args, **kwargs: (args, kwargs)  # noqa: E731
    plain = lambda seed, *given, use_cudagraphable_rng, **groups: seed(*given[:2], **groups)  # noqa: E731
    wrap(initialize, "_set_random_seed", plain)  # without Transformer Engine's generator
    cuda_graphs.HAVE_TE_GRAPHS = True
    cuda_graphs.is_te_min_version = lambda version: True
    cuda_graphs.TECudaGraphHelper._get_cuda_graph_input_data = sample
    cuda_graphs.make_graphed_callables = lambda layers, _, times: [
        graph_of(layer) for _ in range(times) for layer in layers
    ]
    transformer_layer.TransformerLayer._get_te_cuda_graph_replay_args = given
