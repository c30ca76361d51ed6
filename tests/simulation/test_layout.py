import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.cli.analysis.simulated_loads import simulated_stage
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.planning.replica_life import PipelineStage
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.simulation.layout import cluster_of_devices, stages_of
from megatron_fssdp.simulation.moe_job import job_of_run
from tests.drawn_examples import SEEDS, examples
from tests.simulation.small_jobs import cluster_of, loads, outcome_of
from tests.simulation.test_simulated_properties import drawn_loads

UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def run_of(layers=8, model=(), training=(), **parallelism):
    sizes = {"nproc_per_node": 16, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    changes = [f"parallelism.{key}={value}" for key, value in {**sizes, **parallelism}.items()]
    batch = {"global_batch_size": 64, **dict(training)}
    changes += [f"training.{key}={value}" for key, value in batch.items()]
    return load_run(["gpt_moe_tiny"], [f"model.num_layers={layers}", *model, *changes])


def chunks_of(run):
    return [stage.chunks for stage in stages_of(run)]


def test_stages_have_the_layers_of_megatrons_rules():
    pp2, pp4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
    assert chunks_of(run_of(4)) == [((0, 1, 2, 3),)]
    assert chunks_of(run_of(4, **pp2)) == [((0, 1),), ((2, 3),)]
    # Of Megatron's get_num_layers_to_build: with 8 layers, 2 stages and 2 or 4 model chunks of a stage.
    for keys in ({"num_layers_per_virtual_pipeline_stage": 2}, {"num_virtual_stages_per_pipeline_rank": 2}):
        assert chunks_of(run_of(**pp2, **keys)) == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    single_layers = run_of(**pp2, num_layers_per_virtual_pipeline_stage=1)
    assert chunks_of(single_layers) == [((0,), (2,), (4,), (6,)), ((1,), (3,), (5,), (7,))]
    last = run_of(7, **pp4, decoder_last_pipeline_num_layers=1)
    assert chunks_of(last) == [((0, 1),), ((2, 3),), ((4, 5),), ((6,),)]
    ends = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert chunks_of(run_of(6, **pp4, **ends)) == [((0,),), ((1, 2),), ((3, 4),), ((5,),)]


@pytest.mark.parametrize("layout", ["Et|(tt|)*2,tm|tt|L", "E|t*3|||tt|tttL", "Ettt|t|tt|ttL"])
def test_a_layout_has_the_layers_that_megatron_reads_from_it(layout):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    stages = stages_of(run_of(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout))
    rows = PipelineParallelLayerLayout.parse_str_to_list(layout)
    num_layers = [[len(chunk) for chunk in stage.chunks] for stage in stages]
    wanted = [[sum(part.name == "decoder" for part in row) for row in rows[stage::2]] for stage in range(2)]
    assert num_layers == wanted
    in_order = [chunk for pair in zip(*(stage.chunks for stage in stages), strict=True) for chunk in pair]
    assert [layer for chunk in in_order for layer in chunk] == [*range(8)]


@pytest.mark.parametrize(
    ("layers", "keys", "message"),
    [
        (7, {}, "7 layers do not fill 2 pipeline stages, wanted"),
        (8, {"num_virtual_stages_per_pipeline_rank": 3}, "2 pipeline stages of 3 chunks each, wanted"),
        (8, {"pipeline_model_parallel_layout": "Ettt|tttL"}, "has 6 layers in 2 parts, wanted 8 in"),
    ],
)
def test_stages_that_megatron_would_not_build_are_refused(layers, keys, message):
    with pytest.raises(ConfigurationError, match=message):
        stages_of(run_of(layers, pipeline_model_parallel_size=2, **keys))


def test_a_run_without_pipeline_is_the_same_job_as_a_stage_with_all_layers():
    run = run_of()
    assert job_of_run(run, stages_of(run)[0]) == job_of_run(run)
    assert job_of_run(run).bubble == 0


@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_together_have_the_work_and_parameters_of_the_model(tied):
    model = (
        "model.moe_layer_freq=[0,1,0,1,1,1,0,1]",
        f"model.untie_embeddings_and_output_weights={not tied}",
    )
    run = run_of(8, model, pipeline_model_parallel_size=4)
    jobs, whole = [job_of_run(run, stage) for stage in stages_of(run)], job_of_run(run)

    def flops(job):
        return sum(job.before_layer_flops_L) + sum(job.before_gate_flops_L) + job.after_layers_flops

    assert [job.num_layers for job in jobs] == [1, 1, 2, 1]
    assert sum(map(flops, jobs)) == pytest.approx(flops(whole))
    copy = run.vocab_size * run.model.hidden_size if tied else 0
    assert sum(job.dense_elements for job in jobs) == whole.dense_elements + copy
    assert sum(job.activation_bytes for job in jobs) == pytest.approx(whole.activation_bytes)


def test_ranks_of_tensor_and_context_parallelism_share_tokens_and_work():
    cut = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}
    whole, part = job_of_run(run_of()), job_of_run(run_of(**cut))
    assert part.tokens_per_micro_batch == whole.tokens_per_micro_batch / 4
    assert part.before_gate_flops_L == tuple(flops / 4 for flops in whole.before_gate_flops_L)
    assert part.after_layers_flops == whole.after_layers_flops / 4
    assert part.activation_bytes == whole.activation_bytes / 4
    assert part.dense_elements == whole.dense_elements // 2
    assert part.num_micro_batches == 4 * whole.num_micro_batches
    # 16 ranks: 8 copies of the experts, and of the dense parameters one on each rank, or half of one.
    assert (part.expert_data_parallel_size, part.data_parallel_size) == (8, 8)
    assert (whole.expert_data_parallel_size, whole.data_parallel_size) == (8, 16)


def test_ranks_with_parts_of_experts_are_one_device_and_gather_its_rows():
    parted = {"num_peers": 2, "token_bytes": 4, "expert_flops_per_token": 1.5, "expert_elements": 25}
    counts, cluster = loads([[6, 2], [6, 2]]), cluster_of_devices(cluster_of(per_node=4), 2)
    whole = outcome_of("ep", counts, token_bytes=8).parts_s
    parts = outcome_of("ep", counts, cluster=cluster, **parted).parts_s
    assert cluster.devices_per_node == 2
    assert parts["experts"] == whole["experts"] / 2
    # Rows of half the size; the probability of 4 bytes is whole. The 12 rows of device 0 go to its peer.
    rows_s = 2 * 6 * (8 + 4) / 1000
    assert whole["all-to-all"][0] - parts["all-to-all"][0] == pytest.approx(
        rows_s - rows_s + 2 * 6 * 8 / 1000 - 4 * 12 * 4 / 1000
    )
    with pytest.raises(ConfigurationError, match="expert_tensor_parallel_size is 3"):
        cluster_of_devices(cluster_of(per_node=4), 3)
    with pytest.raises(ValueError, match="smart_schedule needs whole experts"):
        outcome_of("ep", counts, keys={"smart_schedule": True}, cluster=cluster, **parted)


@examples(15)
@given(SEEDS, st.sampled_from(["ep", "fssdp", "fastermoe"]), st.integers(1, 4), st.integers(1, 3))
def test_equal_stages_take_their_part_of_the_seconds_and_a_bubble(seed, name, stages, times):
    job = {"num_micro_batches": stages * times, "activation_bytes_per_pair": 1.0}
    counts = np.repeat(drawn_loads(seed, layers=1), 4 * stages, axis=1)
    piped = PipelineStage((4,), num_stages=stages)
    keys = {"reshard_interval": 0, "slots": 2} if name == "fssdp" else {}
    whole, part, alone = (
        outcome_of(name, of_layers, keys=keys, pipeline=pipeline, **job)
        for of_layers, pipeline in ((counts, None), (counts[:, :4], piped), (counts[:, :4], None))
    )
    bubble_s = part.parts_s["pipeline bubble"]
    assert part.iteration_s - bubble_s == pytest.approx(alone.iteration_s)
    before_s = alone.iteration_s - sum(alone.parts_s[name] for name in ("re-sharding", "gradient sync"))
    assert bubble_s == pytest.approx(before_s * (stages - 1) / (stages * times))
    for kind in ("experts", "other compute", "all-to-all"):
        assert stages * part.parts_s[kind] == pytest.approx(whole.parts_s[kind])
    # 1F1B: the first stage keeps a micro-batch for each stage.
    assert part.memory.activation_bytes == pytest.approx(stages * alone.memory.activation_bytes, abs=stages)


@examples(15)
@given(SEEDS, st.sampled_from(["ep", "fssdp", "fastermoe", "quota"]), st.booleans(), st.integers(1, 3))
def test_recomputation_adds_exactly_a_forward_pass(seed, name, remat, micro_batches):
    counts = drawn_loads(seed)
    job = {"num_micro_batches": micro_batches, "before_layer_flops_L": (5.0, 5.0)}
    again = {"recomputed": frozenset({0, 1}), "before_again_flops_L": (5.0, 5.0)}
    keys = {"reshard_interval": 0, "rematerialize": remat} if name == "fssdp" else {}
    first, second = (outcome_of(name, counts, keys=keys, **job, **more) for more in ({}, again))
    for i, iteration in enumerate(second.iterations):
        layers = iteration.micro_batches[0]
        forward_s = {
            "other compute": sum(layer.before_layer_s + layer.before_gate_s for layer in layers),
            "experts": sum(layer.experts_s for layer in layers),
            "all-to-all": sum(
                layer.counts_s + layer.dispatch.seconds + layer.combine.seconds for layer in layers
            ),
            "gradient sync": 0.0,
        }
        for part, seconds in forward_s.items():
            added_s = second.parts_s[part][i] - first.parts_s[part][i]
            # A second gather of weights ends before, so that it no longer shares a link with combine.
            shares = part == "all-to-all" and name == "fssdp"
            assert added_s == pytest.approx(micro_batches * seconds, abs=1e-9) or (
                shares and added_s < micro_batches * seconds
            )
    assert second.host_s >= first.host_s


def test_recomputed_layers_keep_their_inputs_and_the_activations_of_one():
    whole, again, in_pairs = (
        job_of_run(run_of(4, training=keys)) for keys in ({}, UNIFORM, {**UNIFORM, "recompute_num_layers": 2})
    )
    hidden_bytes = whole.activation_bytes / 4 / 7.5
    assert (again.activation_bytes, again.recomputed_bytes) == (4 * hidden_bytes, 7.5 * hidden_bytes)
    assert (in_pairs.activation_bytes, in_pairs.recomputed_bytes) == (2 * hidden_bytes, 15 * hidden_bytes)
    pairs_LD = np.array([[3, 1], [2, 2], [0, 9], [1, 1]])
    assert [job.kept_pairs(pairs_LD) for job in (whole, again, in_pairs)] == [13, 9, 18]
    block = job_of_run(
        run_of(4, training={**UNIFORM, "recompute_method": "block", "recompute_num_layers": 3})
    )
    assert block.recomputed == {0, 1, 2}
    assert block.activation_bytes == (7.5 + 3) * hidden_bytes
    assert again.recomputed == {0, 1, 2, 3}


def test_the_slowest_stage_with_experts_is_simulated_or_the_one_that_is_asked_for():
    run = run_of(8, ("model.moe_layer_freq=[0,0,1,1,1,1,0,1]",), pipeline_model_parallel_size=4)
    counts = np.random.default_rng(0).multinomial(256, np.full(8, 1 / 8), size=(3, 5, 2)).astype(np.int32)
    counts[:, 2, :, 0] += 5000  # the third MoE layer, of stage 2
    record = RecordedLoads(counts, np.arange(1, 4), np.array([3, 4, 5, 6, 8]))
    cluster = cluster_of(expert_flops_per_s=1e12, non_expert_flops_per_s=1e12)
    job, simulated, _, words = simulated_stage(run, record, cluster)
    assert (job, simulated.layers.tolist()) == (job_of_run(run, stages_of(run)[2]), [5, 6])
    np.testing.assert_array_equal(simulated.counts_ILDE, counts[:, 2:4])
    assert "pipeline stage 2 of 0 to 3" in words
    assert "slowest" in words
    job, simulated, _, words = simulated_stage(run, record, cluster, 3)
    assert (job.num_layers, simulated.layers.tolist(), "slowest" in words) == (1, [8], False)
    for stage, words in ((0, r"which has no MoE layers, wanted one of \[1, 2, 3\]"), (4, "wanted 0 to 3")):
        with pytest.raises(ConfigurationError, match=f"--stage: got {stage}, {words}"):
            simulated_stage(run, record, cluster, stage)
