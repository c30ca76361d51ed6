from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.simulation.lanes import ALL_TO_ALL, COMPUTE, TRANSFER
from megatron_fssdp.simulation.workloads import generated_loads
from tests.drawn_examples import SEEDS, examples
from tests.simulation.small_jobs import cluster_of, job_of, outcome_of

SLOW = examples(25)
KEYS = {"slots": 2, "overlap_degree": 3, "reshard_interval": 2}


def drawn_loads(seed, iterations=4, layers=2, devices=4, experts=8):
    rng = np.random.default_rng(seed)
    shares_LE = rng.dirichlet(np.full(experts, 0.4), size=layers)
    return np.stack(
        [[rng.multinomial(16, shares_E, size=devices) for shares_E in shares_LE] for _ in range(iterations)]
    ).astype(np.int32)


def simulated(name, counts, cluster=None, micro_batches=1, **keys):
    keys = KEYS | keys if name == "fssdp" else {}
    return outcome_of(name, counts, keys=keys, cluster=cluster, num_micro_batches=micro_batches)


@SLOW
@given(SEEDS, st.sampled_from(["ep", "fssdp"]), st.floats(1.5, 100))
def test_faster_parts_never_take_longer(seed, name, factor):
    counts = drawn_loads(seed)
    cluster = cluster_of(nodes=2)
    slow = simulated(name, counts, cluster).iteration_s
    for key in ("expert_flops_per_s", "non_expert_flops_per_s"):
        faster = cluster.model_copy(update={key: getattr(cluster, key) * factor})
        assert (simulated(name, counts, faster).iteration_s <= slow + 1e-12).all()
    for key in ("intra_node", "inter_node"):
        link = getattr(cluster, key)
        rate = link.bandwidth_bytes_per_s * factor
        faster = cluster.model_copy(update={key: link.model_copy(update={"bandwidth_bytes_per_s": rate})})
        assert (simulated(name, counts, faster).iteration_s <= slow + 1e-12).all()


@SLOW
@given(SEEDS)
def test_fewer_tokens_and_overlap_never_cost_time(seed):
    counts = drawn_loads(seed)
    more = counts.copy()
    more[:, :, seed % 4, seed % 8] += 5
    assert (simulated("ep", counts).iteration_s <= simulated("ep", more).iteration_s + 1e-12).all()
    apart = simulated("fssdp", counts, overlap=False).iteration_s
    assert (simulated("fssdp", counts).iteration_s <= apart + 1e-12).all()


@SLOW
@given(SEEDS, st.integers(1, 5), st.booleans(), st.booleans())
def test_each_lane_runs_one_span_at_a_time_and_parts_add_up(seed, micro_batches, rematerialize, overlap):
    keys = {"rematerialize": rematerialize, "overlap": overlap, "micro_batches": micro_batches}
    outcome = simulated("fssdp", drawn_loads(seed), **keys)
    for iteration in range(4):
        spans = outcome.spans(iteration)
        for lane in (COMPUTE, ALL_TO_ALL, TRANSFER):
            times = sorted((begin, end) for of, _, begin, end in spans if of == lane)
            assert all(later[0] >= sooner[1] - 1e-9 for sooner, later in pairwise(times))
        # Compute and all-to-alls exclude each other too, and nothing runs after the end.
        shown = sorted((begin, end) for of, _, begin, end in spans if of != "transfer")
        assert all(later[0] >= sooner[1] - 1e-9 for sooner, later in pairwise(shown))
        assert max(end for *_, end in spans) == pytest.approx(outcome.iteration_s[iteration])
        # The time without compute or exchange is waiting.
        busy_s = sum(end - begin for begin, end in shown)
        waited_s = sum(
            float(outcome.parts_s[part][iteration]) for part in outcome.parts_s if "waiting" in part
        )
        resharded_s = float(outcome.parts_s["re-sharding"][iteration])
        assert busy_s + waited_s + resharded_s == pytest.approx(outcome.iteration_s[iteration])


def test_simulated_memory_equals_the_accounting_and_can_run_out():
    counts = drawn_loads(3)
    outcome = simulated("fssdp", counts, cluster_of(nodes=2, memory_bytes=10**6), reshard_interval=0)
    memory = outcome.memory
    # 2 layers of 2 experts, 50 elements: 2 bytes, main_grad 4, Adam 8.
    assert memory.experts.expert_parallelism_bytes == 4 * 50 * (2 + 4 + 8)
    # At most 2 replicas a device in each of 2 layers; gradients of one layer's, in fp32.
    assert memory.experts.replica_parameters_bytes == 2 * 2 * 50 * 2
    assert memory.experts.replica_gradients_bytes == 2 * 50 * 4
    assert not memory.runs_out
    plain = simulated("ep", counts).memory
    assert plain.experts.above_expert_parallelism_bytes == 0
    between = (plain.total_bytes + memory.total_bytes) // 2
    cluster = cluster_of(nodes=2, memory_bytes=between)
    assert simulated("fssdp", counts, cluster, reshard_interval=0).memory.runs_out
    assert not simulated("ep", counts, cluster).memory.runs_out
    again = simulated("fssdp", counts, rematerialize=True, reshard_interval=0).memory
    assert again.experts.replica_parameters_bytes == 2 * 50 * 2


@pytest.mark.parametrize("name", [name for name, entry in STRATEGIES.items() if entry.strategy is not None])
def test_every_strategy_plans_for_more_devices_than_experts_and_loses_no_token(name):
    job = job_of(devices=16, experts=6, layers=3, tokens_per_micro_batch=12)
    counts_ILDE = generated_loads("W6", job, 8)
    cluster = cluster_of(nodes=4, per_node=4)
    outcome = outcome_of(name, counts_ILDE, cluster=cluster, tokens_per_micro_batch=12)
    assert (outcome.tokens_ILD.sum(axis=2) == counts_ILDE.sum(axis=(2, 3))).all()
    assert (outcome.iteration_s > 0).all()
    # 18 experts on 16 devices: a device owns at most 2.
    assert outcome.memory.experts.slot_parameters_bytes == 2 * job.expert_bytes
