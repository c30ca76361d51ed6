import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.simulation.moe_job import job_of_run
from megatron_fssdp.simulation.workloads import fitted_loads, generated_loads
from tests.simulation.small_jobs import job_of


def run_of(*overrides):
    return load_run(["gpt_moe_tiny"], overrides)


def test_the_tiny_config_gives_the_expected_job():
    job = job_of_run(run_of())
    tokens = 4 * 128
    assert (job.num_devices, job.num_experts, job.top_k, job.num_micro_batches) == (4, 8, 2, 1)
    assert (job.tokens_per_micro_batch, job.token_bytes, job.expert_elements) == (
        tokens,
        64 * 4,
        2 * 64 * 128,
    )
    assert job.expert_flops_per_token == 2 * job.expert_elements
    # Projections 4 h², scores and values 4 s h, gate 2 h E: a token.
    assert job.before_gate_flops_L == (tokens * (8 * 64 * 64 + 4 * 128 * 64 + 2 * 64 * 8),) * 4
    assert job.after_layers_flops == tokens * 2 * 64 * 2048
    assert job.dense_elements == 2048 * 64 + 4 * (4 * 64 * 64 + 64 * 8)
    assert job.pairs_per_device == 2 * tokens


@pytest.mark.parametrize(("dispatcher", "is_fused"), [("flex", True), ("alltoall", False)])
def test_the_run_says_whether_its_dispatcher_sends_each_token_once(dispatcher, is_fused):
    job = job_of_run(run_of(f"model.moe_token_dispatcher_type={dispatcher}"))
    assert job.choices == TokenChoices(2, is_fused=is_fused)


def test_dense_layers_count_before_the_next_moe_layer():
    job = job_of_run(run_of("model.moe_layer_freq=[0, 1, 0, 1]", "model.swiglu=true", "training.bf16=true"))
    assert len(job.before_layer_flops_L) == 2
    attention = 8 * 64 * 64 + 4 * 128 * 64
    assert job.before_layer_flops_L == (512 * (attention + 6 * 64 * 128),) * 2
    assert job.expert_elements == 3 * 64 * 128
    assert (job.dtype_bytes, job.gradient_bytes, job.optimizer.has_master_weights) == (2, 4, True)


def test_full_recomputation_without_a_method_is_refused():
    with pytest.raises(ConfigurationError, match="recompute_method is null"):
        job_of_run(run_of("training.recompute_granularity=full"))


@pytest.mark.parametrize(
    ("name", "micro_batches"), [("lognormal-strong", ()), ("drift", (2,)), ("jump-micro", (2,))]
)
def test_generated_loads_have_the_jobs_size(name, micro_batches):
    counts = generated_loads(name, job_of(devices=4, experts=8, layers=3, num_micro_batches=2), 5)
    assert counts.shape == (5, *micro_batches, 3, 4, 8)
    assert (counts.sum(axis=-1) == (8 if micro_batches else 16)).all()
    assert not np.array_equal(counts[:, 0], counts[:, 1])  # of layers or micro-batches
    assert generated_loads(name, job_of(devices=4, experts=8), 5).shape == (5, 1, 4, 8)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_records_of_micro_batches_fit_a_job_with_fewer(number):
    counts = np.random.default_rng(0).integers(10, 60, (3, 4, 1, 2, 4))
    job = job_of(devices=4, experts=4, tokens_per_micro_batch=100, num_micro_batches=number)
    fitted, factor = fitted_loads(counts, job)
    assert fitted.shape == (3, number, 1, 4, 4)
    assert fitted.sum(axis=(1, 4)).mean() == pytest.approx(100 * number, rel=0.01)
    joined = counts.reshape(3, number, -1, 1, 2, 4).sum(axis=2).repeat(2, axis=3)
    assert fitted == pytest.approx(joined * factor, abs=0.5)


@pytest.mark.parametrize("sources", [1, 2, 4, 8])
def test_records_fit_other_numbers_of_devices(sources):
    counts = np.random.default_rng(0).integers(10, 60, (3, 1, sources, 4))
    job = job_of(devices=4, experts=4, tokens_per_micro_batch=100)
    fitted, factor = fitted_loads(counts, job)
    assert fitted.shape == (3, 1, 4, 4)
    assert fitted.sum(axis=3).mean() == pytest.approx(100, rel=0.01)
    shares, wanted = (values.sum(axis=2) / values.sum(axis=(2, 3))[..., None] for values in (fitted, counts))
    assert shares == pytest.approx(wanted, abs=0.01)
    assert factor == pytest.approx(100 * min(sources, 4) / (counts.sum() / 3))


def test_a_record_of_the_jobs_size_is_unchanged():
    counts = np.full((1, 1, 2, 2), 4)
    fitted, factor = fitted_loads(counts, job_of())
    assert factor == 1.0
    assert np.array_equal(fitted, counts)


@pytest.mark.parametrize(
    ("change", "counts", "message"),
    [
        ({"layers": 2}, np.ones((1, 1, 2, 2), int), "of 1 MoE layers with 2 experts, wanted"),
        ({"experts": 4}, np.ones((1, 1, 2, 2), int), "of 1 MoE layers with 2 experts, wanted"),
        ({}, np.ones((1, 1, 3, 2), int), "a record of 3 devices, but"),
        ({}, np.ones((0, 1, 2, 2), int), "got 0 recorded iterations"),
        ({"num_micro_batches": 3}, np.ones((1, 4, 1, 2, 2), int), "4 micro-batches for 3"),
        ({}, np.zeros((1, 1, 2, 2), int), "the record has no tokens"),
    ],
)
def test_records_that_do_not_fit_are_refused(change, counts, message):
    with pytest.raises(ConfigurationError, match=f"--loads: .*{message}"):
        fitted_loads(counts, job_of(**change))
