"""No run replaces the records of another one."""

from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.megatron_adapter.iterations.record_folder import record_folder
from megatron_fssdp.records.metrics import METRICS_FILE
from megatron_fssdp.records.run_settings import write_recorded_settings


def run_of(*overrides):
    return load_run(["gpt_moe_tiny"], ["training.save=ckpt", "training.global_batch_size=null", *overrides])


def record(folder, run):
    write_recorded_settings(folder, run, {"name": "fssdp", "settings": {}})
    (folder / METRICS_FILE).write_text("{}\n")


def test_another_run_gets_a_folder_of_its_own(tmp_path, caplog):
    asked, run = tmp_path / "records", run_of()
    assert record_folder(asked, run, resumes=False) == asked
    assert not caplog.text
    record(asked, run)
    second = tmp_path / "records-2"
    assert record_folder(asked, run, resumes=False) == second
    assert f"go to {second}" in caplog.text
    record(second, run)
    assert record_folder(asked, run, resumes=False) == tmp_path / "records-3"
    (second / METRICS_FILE).write_text("")  # of a run that ended before its first iteration
    assert record_folder(asked, run, resumes=False) == second


def test_a_resumed_run_continues_its_own_records(tmp_path):
    asked = tmp_path / "records"
    record(asked, run_of())
    assert record_folder(asked, run_of("training.train_iters=99"), resumes=True) == asked
    for change in ("model.num_layers=6", "parallelism.num_nodes=2", "training.save=elsewhere"):
        assert record_folder(asked, run_of(change), resumes=True) == tmp_path / "records-2", change
    record(tmp_path / "records-2", run_of())
    assert record_folder(asked, run_of(), resumes=True) == tmp_path / "records-2", "the latest"


def test_runs_that_a_yaml_cannot_describe_are_told_apart_by_that(tmp_path):
    record(tmp_path / "records", None)
    assert record_folder(tmp_path / "records", None, resumes=True) == tmp_path / "records"
    assert record_folder(tmp_path / "records", run_of(), resumes=True) == tmp_path / "records-2"


def test_sizes_that_a_yaml_leaves_to_megatrons_defaults_are_the_same(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "config.yaml").write_text("include: [gpt_moe_tiny.yaml]\n")
    for settings, name in (
        (["model.kv_channels=16", "model.moe_ffn_hidden_size=128"], "run"),
        (["model.hidden_size=128"], "run-2"),
    ):
        assert record_folder(folder, load_run(["gpt_moe_tiny"], settings), resumes=True) == tmp_path / name
