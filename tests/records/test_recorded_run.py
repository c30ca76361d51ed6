import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_fssdp import records
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records import run_settings
from megatron_fssdp.records.metrics import IterationMetrics, LayerMetrics, MetricsWriter
from tests.config.test_yaml_fuzzing import changed

OLD_RUN = Path(__file__).parent / "old_run"
"""Three iterations of ``fssdp`` on four CPU ranks, written by version 0.1 before the rooms were divided."""


def test_an_old_run_folder_is_read():
    run = records.load(OLD_RUN)
    assert (run.strategy, run.layers, run.asked_iterations, run.problems) == ("fssdp", [1, 2, 3, 4], 14, ())
    assert run_settings.run_config_of(OLD_RUN).model.num_experts == 8
    assert run.expert_memory.startswith("experts 3.6 MiB")
    assert run.session is not None
    assert run.session.shared_cores == "4 ranks share 2 cores"
    lines = [json.loads(line) for line in (OLD_RUN / "metrics.jsonl").read_text().splitlines()]
    arrays = run.arrays
    assert arrays["lm_loss_I"].tolist() == [line["lm_loss"] for line in lines]
    loads = [[layer["load_max_over_mean"] for layer in line["layers"]] for line in lines]
    assert arrays["load_max_over_mean_IL"].tolist() == loads
    experts = [[layer["forward"]["experts_s"] for layer in line["layers"]] for line in lines]
    assert arrays["forward_experts_s_IL"].tolist() == experts
    assert arrays["loads.counts_ILDE"].shape == (3, 4, 4, 8)
    # Both files count the same tokens, and placement only moves them between devices.
    tokens_IL = arrays["loads.counts_ILDE"].sum(axis=(2, 3))
    np.testing.assert_array_equal(tokens_IL, arrays["placements.tokens_ILD"].sum(axis=2))
    np.testing.assert_array_equal(tokens_IL, arrays["placements.ep_tokens_ILD"].sum(axis=2))


def test_folders_that_hold_no_run_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigurationError, match="no finished iteration"):
        records.load(tmp_path)
    writer = MetricsWriter(tmp_path)
    for number in (1, 2):
        layers = (LayerMetrics(number, 1.0, 1.0, 0, 0, 0, 0),)
        writer.append(IterationMetrics(number, 1.0, None, 1.0, 1.0, layers))
    with pytest.raises(ConfigurationError, match="mixes different models"):
        records.load(tmp_path)
    shutil.copy(OLD_RUN / "metrics.jsonl", tmp_path)
    (tmp_path / "config.yaml").write_text("model: {}")
    with pytest.raises(ConfigurationError, match="names no strategy"):
        records.load(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "loads.npy", "placements.npy"])
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=6)), min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_files_are_valid_or_refused_in_one_line(tmp_path, name, changes):
    if not (tmp_path / name).exists():
        shutil.copytree(OLD_RUN, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(changed((OLD_RUN / name).read_bytes(), changes))
    try:
        run = records.load(tmp_path)
    except ConfigurationError as error:
        problems = str(error).splitlines()
        assert (name, len(problems)) == ("metrics.jsonl", 1)
        return
    assert all(len(problem.splitlines()) == 1 and name in problem for problem in run.problems)
    assert run.arrays["load_max_over_mean_IL"].shape == (len(run.metrics), len(run.layers))


GPT = run_settings.flat_settings(
    {
        "model": {"family": "gpt", "hidden_size": 64},
        "data": {"path": "a", "vocab_size": 2048},
        "training": {"train_iters": 10, "lr": 0.001, "seed": 1},
        "strategy": {"name": "ep", "settings": {}},
    }
)


def test_strategies_and_seeds_may_differ_and_are_named():
    others = GPT | {"training.seed": 2, "strategy.name": "fssdp", "strategy.settings.slots": 2}
    wanted = {"training.seed": ("1", "2"), "strategy.name": ("ep", "fssdp")}
    wanted["strategy.settings.slots"] = ("–", "2")
    assert run_settings.differing_settings([GPT, others]) == wanted
    assert run_settings.loss_obstacle([GPT, others]) == ""
    # Unknown settings count as equal.
    assert run_settings.differing_settings([GPT, {}, {"strategy.name": "ep"}]) == {}


@pytest.mark.parametrize(
    ("changed", "obstacle"),
    [
        ({"model.family": "bert"}, "different model (model.family gpt and bert)"),
        ({"training.train_iters": 20}, "different learning-rate schedule (training.train_iters 10 and 20)"),
        ({"data.path": "b"}, "different data (data.path a and b)"),
        ({"model.capacity": 1.5}, "different model (model.capacity – and 1.5)"),
    ],
)
def test_other_models_schedules_and_data_are_an_obstacle(changed, obstacle):
    assert run_settings.loss_obstacle([GPT, GPT | changed]) == obstacle


def test_the_same_data_in_two_folders_is_no_difference(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text('{"files": {"text.bin": {"sha256": "0"}}}')
    runs = [GPT | {"data.path": str(tmp_path / name)} for name in ("a", "b")]
    assert run_settings.differing_settings(runs) == {}


@pytest.mark.parametrize("header", [run_settings.RECORDED_RUN_HEADER, "# another\n"])
def test_settings_of_train_are_never_replaced(tmp_path, header):
    (tmp_path / "config.yaml").write_text(text := f"{header}strategy: {{name: ep}}\n")
    refused = pytest.raises(ConfigurationError, match="exists")
    with nullcontext() if header == run_settings.RECORDED_RUN_HEADER else refused:
        assert not run_settings.write_recorded_settings(tmp_path, None, {"name": "fssdp", "settings": {}})
    assert (tmp_path / "config.yaml").read_text() == text
