"""The worked example of docs/contributing.md plans, is simulated, and trains with plain EP's losses."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.cli.simulate_command import settings_of
from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.composition import load_run
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy_selection import resolve_strategy
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.reporting.run_records import read_metrics
from megatron_fssdp.simulation.moe_job import job_of_run
from megatron_fssdp.simulation.simulator import simulate
from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import LayerContext, Strategy

from ..example_strategy import NAME, forget_example, register_example
from ..training_run import relative_difference, train


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_example()
    yield
    forget_example()


def built(**settings: object) -> Strategy:
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return build_strategy(*resolve_strategy(NAME, overrides=overrides))  # type: ignore[arg-type]


def test_the_examples_settings_are_checked_like_any_strategys() -> None:
    assert resolve_strategy(NAME, overrides=["threshold=1.5"])[1].threshold == 1.5  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="unknown key 'treshold'; did you mean 'threshold'"):
        resolve_strategy(NAME, overrides=["treshold=1.5"])


def test_the_busiest_devices_hottest_expert_goes_to_the_idlest_and_even_loads_move_none() -> None:
    context = LayerContext(1, np.arange(8) // 2, Topology.uniform(4, 2))
    history = LoadHistory(1, 4, 8)
    assert built().before_gate(context, history).placement.num_replicas == 0
    history.append(np.full((4, 8), 5))
    assert built().before_gate(context, history).placement.num_replicas == 0
    counts_DE = np.full((4, 8), 5)
    counts_DE[:, 3] = 40
    counts_DE[:, 6] = 1
    history.append(counts_DE)
    placement = built().before_gate(context, history).placement
    assert placement.num_replicas == 1
    assert placement.present_ED[3].tolist() == [False, True, False, True]
    assert built(threshold=3.9).before_gate(context, history).placement.num_replicas == 0


def test_the_example_beats_plain_expert_parallelism_on_one_hot_expert_in_simulation() -> None:
    run = load_run(["gpt_moe_tiny"])
    job, cluster = job_of_run(run), load_cluster("hpwnv")
    shape = WorkloadShape(job.num_devices, job.num_experts, 4096, job.top_k, 4)
    counts_ILDE = np.repeat(WORKLOADS["W3"].counts(shape)[:, None], job.num_layers, axis=1)
    outcomes = {
        name: simulate(name, settings_of(name, run), counts_ILDE, cluster, job) for name in (NAME, "ep")
    }
    assert outcomes[NAME].load_max_over_mean_IL[1:].max() < outcomes["ep"].load_max_over_mean_IL.min()


# --8<-- [start:training]
def test_the_example_trains_with_the_losses_of_plain_expert_parallelism(
    text_data: Path, tmp_path: Path
) -> None:
    common = "--expert-model-parallel-size 2 --train-iters 6 --moe-strategy"
    wanted = train(2, f"{common} ep", text_data)
    chosen = f"{NAME} --moe-strategy-set threshold=1 --moe-strategy-set record_dir={tmp_path}"
    run = train(2, f"{common} {chosen}", text_data, before=register_example)
    assert relative_difference(run.losses, wanted.losses) <= 1e-5
    assert relative_difference(run.grad_norms, wanted.grad_norms) <= 1e-5
    metrics = read_metrics(tmp_path)
    replicas = [[layer.num_replicas for layer in entry.layers] for entry in metrics]
    assert replicas[0] == [0, 0]  # no loads are known yet
    assert sum(map(sum, replicas[1:])) >= 8  # exactly even loads are rare


# --8<-- [end:training]
