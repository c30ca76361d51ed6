"""More devices than experts: every strategy plans, and no token is lost."""

import pytest

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.simulation.simulator import simulate
from megatron_fssdp.simulation.workloads import generated_loads
from tests.simulation.small_jobs import cluster_of, job_of, settings_of

PLACING = [name for name, entry in STRATEGIES.items() if entry.strategy is not None]


@pytest.mark.parametrize("name", PLACING)
def test_every_strategy_takes_more_devices_than_experts(name: str) -> None:
    job = job_of(devices=16, experts=6, layers=3, tokens_per_micro_batch=12)
    counts_ILDE = generated_loads("W6", job, 8)
    outcome = simulate(name, settings_of(name), counts_ILDE, cluster_of(nodes=4, per_node=4), job)
    assert (outcome.tokens_ILD.sum(axis=2) == counts_ILDE.sum(axis=(2, 3))).all()
    assert (outcome.iteration_s > 0).all()
    # 18 experts on 16 devices: a device owns at most 2.
    assert outcome.memory.experts.slot_parameters_bytes == 2 * job.expert_bytes
