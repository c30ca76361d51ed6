"""`megatron-fssdp train` in a folder that has a run: refused, resumed, overwritten."""

import shutil
import subprocess
import sys

from megatron_fssdp.config.loading import load_yaml
from megatron_fssdp.launch.train_request import TrainRequest

from ..launch.tiny_run import TINY, fake_data, words_of


def test_an_output_folder_that_is_taken_is_refused(command, tmp_path):
    out = tmp_path / "x"
    out.mkdir()
    (out / "metrics.jsonl").touch()
    data = fake_data(tmp_path / "data")
    code, _, err = command("train", TINY, "--set", f"data.path={data}", "--out", out)
    assert code == 2
    assert (
        "already holds a run (metrics.jsonl); it has no checkpoint to continue from, so move it aside" in err
    )
    assert "--overwrite" in err
    code, _, err = command("train", TINY, "--set", f"data.path={data}", "--out", out, "--resume")
    assert code == 2
    assert "start the run again with --overwrite" in err
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    _, _, err = command("train", TINY, "--set", f"data.path={data}", "--out", out)
    assert "continue it with --resume, move it aside with --overwrite, or choose another folder" in err
    assert "exclude each other" in command("train", TINY, "--out", out, "--resume", "--overwrite")[2]


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


def test_a_live_run_is_left_alone(command, tmp_path):
    data, out = fake_data(tmp_path / "data"), tmp_path / "x"
    code = "import pathlib, sys, time; from megatron_fssdp.config import run_lock\n"
    code += "run_lock.hold(pathlib.Path(sys.argv[1]), ''); print('held', flush=True); time.sleep(120)"
    with subprocess.Popen([sys.executable, "-c", code, out], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        for flag in ((), ("--overwrite",), ("--resume",)):
            code, _, err = command("train", TINY, "--set", f"data.path={data}", "--out", out, *flag)
            assert code == 2
            assert f"a run is in progress here (process {other.pid} on" in err
        other.kill()
    assert "already holds a run" in command("train", TINY, "--set", f"data.path={data}", "--out", out)[2]
