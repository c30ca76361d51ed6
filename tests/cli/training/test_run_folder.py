import shutil

import pytest

from megatron_fssdp.cli.training.run_folder import RunFolder
from megatron_fssdp.cli.training.train_request import TrainRequest
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import load_yaml, validate
from megatron_fssdp.config.run.composition import difference, lay_over, load_run
from megatron_fssdp.config.run.run_config import RunConfig

from .tiny_run import TINY, fake_data, words_of


def test_an_output_folder_that_is_taken_is_refused(command, tmp_path):
    out = tmp_path / "x"
    out.mkdir()
    (out / "metrics.jsonl").touch()
    data = fake_data(tmp_path / "data")
    code, _, err = command("train", TINY, "--set", f"data.path={data}", "--out", out)
    assert code == 2
    assert "already holds a run (metrics.jsonl); it has no checkpoint to continue from, so replace it" in err
    assert "--overwrite" in err
    code, _, err = command("train", TINY, "--set", f"data.path={data}", "--out", out, "--resume")
    assert code == 2
    assert "start the run again with --overwrite" in err
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    _, _, err = command("train", TINY, "--set", f"data.path={data}", "--out", out)
    assert "continue it with --resume, replace it with --overwrite, or choose another folder" in err
    assert "exclude each other" in command("train", TINY, "--out", out, "--resume", "--overwrite")[2]


def test_overwriting_deletes_the_files_of_a_run_and_nothing_else(tmp_path):
    folder = RunFolder(tmp_path / "x")
    folder.create(load_run([TINY]))
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "iter_0000002").mkdir(parents=True)
    folder.checkpoints.symlink_to(elsewhere)
    files = ("metrics.jsonl", "loads.npy", "placements.npy", "log.txt")
    for name in (*files, "notes.txt", "report.html"):
        (folder.path / name).touch()
    (folder.path / "tensorboard").mkdir()
    folder.delete_run()
    assert {path.name for path in folder.path.iterdir()} == {"notes.txt", "report.html"}
    assert (elsewhere / "iter_0000002").is_dir()


def test_a_resumed_run_keeps_earlier_options_and_new_ones_win(command, tmp_path):
    out, files = tmp_path / "x", [TINY]
    first = TrainRequest(files, "ep", overrides=["training.lr=3e-4"], iterations=400, out=out)
    first.folder.create(first.resolve(), first.changed_settings())
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")

    second = TrainRequest(files, out=out, resume=True)
    assert second.resolve() == first.resolve()
    assert second.changed_settings() == first.changed_settings() == load_yaml(first.folder.overrides)
    code, text, err = command("train", TINY, "--out", out, "--resume", "--iters", 500, "--dry-run")
    assert (code, err) == (0, "")
    words = words_of(text)
    for flag, value in {"--train-iters": "500", "--lr": "0.0003", "--moe-strategy": "ep"}.items():
        assert words[words.index(flag) + 1] == value
    third = TrainRequest(files, "fssdp", strategy_overrides=["slots=2"], out=out, resume=True)
    assert third.resolve().strategy.settings == {"slots": 2}
    assert TrainRequest(files, "ep", out=out).resolve().training.lr != 3e-4  # a new run keeps nothing


def test_the_difference_layered_over_the_files_gives_the_options_values():
    files = {"strategy": {"name": "fssdp", "settings": {"slots": 1}}, "training": {"lr": 1, "seed": 2}}
    for final in (
        {"strategy": {"name": "ep"}, "training": {"lr": 1, "seed": 3}},
        {"strategy": {"name": "fssdp", "settings": {"slots": 1, "nodes": 4}}, "training": files["training"]},
        files,
    ):
        assert lay_over(files, difference(files, final)) == final
    assert difference(files, files) == {}


def test_resume_needs_a_checkpoint_and_remaining_iterations(command, tmp_path):
    data, out = fake_data(tmp_path / "data"), tmp_path / "x"
    asked = ("train", TINY, "--set", f"data.path={data}", "--out", out, "--resume")
    assert "--resume: no checkpoint in" in command(*asked)[2]
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("60\n")
    assert "has already finished 60 iterations; ask for more with --iters" in command(*asked)[2]


def test_resume_as_another_model_is_refused(command, tmp_path):
    data, out = fake_data(tmp_path / "data"), tmp_path / "x"
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10\n")
    shutil.copy(TINY, out / "config.yaml")
    asked = ("train", TINY, "--set", f"data.path={data}", "--out", out, "--resume")
    for setting in ("model.hidden_size=128", "training.lr=1e-2"):
        code, _, err = command(*asked, "--set", setting)
        assert code == 2
        assert f"--resume: {setting.split('=')[0]} is" in err
        assert "was started with" in err


def test_the_written_config_merges_several_files(tmp_path):
    config = load_run(["models/tiny-deepseekmoe", "parallelism/cpu", "training/tiny", "strategies/fssdp"])
    folder = RunFolder(tmp_path / "x")
    folder.create(config)
    assert load_run([folder.config]) == config
    assert list(load_yaml(folder.config)) == list(RunConfig.model_fields)


def test_the_written_config_can_be_loaded_again(tmp_path):
    config = validate(RunConfig, load_yaml(TINY), "tiny")
    folder = RunFolder(tmp_path / "x")
    folder.create(config)
    assert validate(RunConfig, load_yaml(folder.config), "again") == config


def test_words_for_megatron_are_in_the_record_and_are_kept(tmp_path):
    request = TrainRequest(
        [TINY], out=tmp_path, megatron_words=["--hidden-size", "128", "--moe-z-loss-coeff", "1e-3"]
    )
    run = request.resolve()
    request.folder.create(run, request.changed_settings())
    recorded = validate(RunConfig, load_yaml(tmp_path / "config.yaml"), "config.yaml")
    assert recorded == run
    assert (recorded.model.hidden_size, recorded.model.moe_z_loss_coeff) == (128, 1e-3)
    assert TrainRequest([TINY], out=tmp_path, resume=True).resolve() == run
    with pytest.raises(
        ConfigurationError, match=r"--resume: model.hidden_size is 64, but .* was started with 128"
    ):
        request.folder.check_unchanged(TrainRequest([TINY]).resolve())
