from dataclasses import replace

import pytest

from megatron_fssdp.planning.replica_life import PipelineStage
from megatron_fssdp.simulation.dense_messages import DenseMessages, MessageSeconds, RankLinks
from megatron_fssdp.simulation.layout import cluster_of_devices, stages_of
from megatron_fssdp.simulation.moe_job import job_of_run
from tests.simulation.small_jobs import cluster_of, loads, outcome_of
from tests.simulation.test_layout import UNIFORM, run_of

HIDDEN = {"hidden_bytes": 100.0}
HOT = [[6, 2], [6, 2]]


def test_tensor_parallel_blocks_gather_and_scatter_in_both_passes():
    """Three peers send a part of 100 bytes each at 1,000 bytes/s: 0.3 s a collective, 0.6 s a block."""
    sizes = DenseMessages(tensor_size=4, dense_layers=((1, 0), (2, 1)), **HIDDEN)
    seconds = RankLinks(cluster_of(per_node=4)).dense_seconds(sizes)
    assert seconds.of_moe == pytest.approx((0.6, 0.6))
    assert seconds.of_dense[0] == pytest.approx((1.2, 1.2))
    assert seconds.of_dense[1] == pytest.approx((2.4, 2.4 + 1.2))  # one layer's forward pass again
    shared = RankLinks(cluster_of(per_node=4)).dense_seconds(replace(sizes, shared_experts=True))
    assert shared.of_moe == pytest.approx((1.2, 1.2))
    # A ring over both nodes leaves each of them once, at 100 bytes/s.
    apart = RankLinks(cluster_of(nodes=2)).dense_seconds(sizes)
    assert apart.of_moe == pytest.approx((6, 6))


@pytest.mark.parametrize(
    ("per_node", "step_s"),
    [(4, 50 / 1000), (2, 2 * 50 / 100)],  # both tensor parallel ranks of a node send to the next node
)
def test_a_ring_of_keys_and_values_hides_behind_the_attention_of_one_step(per_node, step_s):
    """Attention of 0.2 FLOPs takes 0.04 s, a half of it for each of two steps."""
    sizes = DenseMessages(tensor_size=2, context_size=2, keys_bytes=50.0, scores_flops=0.2, **HIDDEN)
    cluster = cluster_of(nodes=4 // per_node, per_node=per_node)
    block_s = 2 * 100 / 1000
    waited_s = step_s - 0.02
    wanted_s = block_s + waited_s, block_s + 2 * waited_s
    assert RankLinks(cluster).dense_seconds(sizes).of_moe == pytest.approx(wanted_s)
    hidden = RankLinks(cluster).dense_seconds(replace(sizes, scores_flops=1000.0))
    assert hidden.of_moe == pytest.approx((block_s, block_s))


@pytest.mark.parametrize("chunks", [(1,), (1, 1)])
def test_stages_wait_for_messages_which_an_interleaved_schedule_hides(chunks):
    """4 stages of 2 ranks on 4 nodes: both ranks send 100 bytes at 100 bytes/s together, 2 s a message."""
    dense = DenseMessages(stage_ranks=2, num_stages=4, **HIDDEN)
    layers, times = len(chunks), 8
    job = {"cluster": cluster_of(nodes=4), "num_micro_batches": times}
    stage = PipelineStage(chunks, num_stages=4)
    counts = loads(HOT, layers=layers)
    alone = outcome_of("ep", counts, **job)
    in_stages = outcome_of("ep", counts, dense=dense, pipeline=stage, **job)
    messages_s = 2 * 2 * layers * times
    bubble_s = 3 / (layers * times) * (alone.mean_s + messages_s)
    waited_s = messages_s if layers == 1 else 0
    assert in_stages.parts_s["pipeline bubble"] == pytest.approx(bubble_s + waited_s)


def test_each_pass_of_a_recomputed_layer_waits_for_its_messages():
    dense = DenseMessages(tensor_size=2, dense_layers=((1, 1), (1, 0)), **HIDDEN)
    job = {"num_micro_batches": 3, "recomputed": frozenset({0})}
    outcome = outcome_of("ep", loads(HOT), dense=dense, **job)
    # Blocks of 0.2 s: dense layers have 2 in each pass, the first one 2 again, the MoE layer 1 + 1 + 1.
    assert outcome.parts_s["dense messages"] == pytest.approx(3 * 0.2 * (2 * 4 + 2 + 3))
    assert outcome.mean_s - outcome_of("ep", loads(HOT), **job).mean_s == pytest.approx(3 * 0.2 * 13)


def test_a_ring_of_gradients_shares_the_nics_with_those_of_other_groups():
    links = RankLinks(cluster_of(nodes=2, per_node=4))
    assert links.reduction_s(4, 1, 300.0) == pytest.approx(2 * 3 / 4 * 300 / 1000)
    assert links.reduction_s(4, 2, 300.0) == pytest.approx(2 * 2 * 3 / 4 * 300 / 100)
    assert links.reduction_s(1, 8, 300.0) == 0
    # A ring has the NICs of all four devices, which reach 25 bytes/s each; one of two rings has half of them.
    slow = cluster_of(nodes=2, per_node=4, inter_device={"alpha_s": 0, "bandwidth_bytes_per_s": 25})
    assert RankLinks(slow).reduction_s(8, 1, 300.0) == pytest.approx(2 * 7 / 8 * 300 / 100)
    assert RankLinks(slow).reduction_s(4, 2, 300.0) == links.reduction_s(4, 2, 300.0)
    # Devices of two ranks have half of the node's NICs in their description.
    pairs = RankLinks(cluster_of_devices(cluster_of(nodes=2, per_node=4), 2), 2)
    assert pairs.reduction_s(4, 2, 300.0) == links.reduction_s(4, 2, 300.0)


def test_a_run_gives_the_sizes_of_its_messages():
    cut = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
    }
    model = ("model.moe_layer_freq=[0,1,1,0,0,1,1,0]", "model.moe_shared_expert_intermediate_size=32")
    run = run_of(8, model, {**UNIFORM, "recompute_method": "block"}, **cut)
    job = job_of_run(run, stages_of(run)[1])
    # Chunks of the layers 2, 3 and 6, 7: the first of each is recomputed. 4 sequences of 128 tokens.
    tokens = 4 * 128 / 4
    assert job.dense == DenseMessages(
        tensor_size=2,
        context_size=2,
        stage_ranks=8,
        num_stages=2,
        hidden_bytes=tokens * 64 * 4,
        keys_bytes=tokens * 2 * 64 * 4,
        scores_flops=tokens * 4 * 128 * 64,
        shared_experts=True,
        dense_layers=((0, 0), (1, 0), (1, 0)),
    )
    assert RankLinks(cluster_of()).dense_seconds(DenseMessages()).of_moe == MessageSeconds()
