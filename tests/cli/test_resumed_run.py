import shutil
import subprocess
import sys

import pytest

from megatron_fssdp.config.loading import load_yaml
from megatron_fssdp.launch.train_request import TrainRequest

from ..launch.tiny_run import TINY, fake_data, words_of


@pytest.fixture
def out(tmp_path):
    return tmp_path / "x"


@pytest.fixture
def refused(command, tmp_path, out):
    """Runs `train TINY ARGS…` into the folder, requires exit code 2, and returns the message."""
    data = fake_data(tmp_path / "data")

    def run(*arguments):
        code, _, err = command("train", TINY, "--set", f"data.path={data}", "--out", out, *arguments)
        assert code == 2
        return err

    return run


def save_checkpoint(out, iteration):
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")


def test_an_output_folder_that_is_taken_is_refused(refused, out):
    assert "--resume: no checkpoint in" in refused("--resume")
    out.mkdir()
    (out / "metrics.jsonl").touch()
    assert (
        "already holds a run (metrics.jsonl); it has no checkpoint to continue from, so move it aside with "
        "--overwrite" in refused()
    )
    assert "start the run again with --overwrite" in refused("--resume")
    save_checkpoint(out, 60)
    wanted = "continue it with --resume, move it aside with --overwrite, or choose another folder"
    assert wanted in refused()
    assert "exclude each other" in refused("--resume", "--overwrite")
    assert "has already finished 60 iterations; ask for more with --iters" in refused("--resume")


def test_a_resumed_run_keeps_earlier_options_and_new_ones_win(command, out):
    files = [TINY]
    first = TrainRequest(files, "ep", overrides=["training.lr=3e-4"], iterations=400, out=out)
    first.folder.create(first.resolve(), first.changed_settings())
    save_checkpoint(out, 20)
    second = TrainRequest(files, out=out, resume=True)
    assert second.resolve() == first.resolve()
    assert second.changed_settings() == first.changed_settings() == load_yaml(first.folder.overrides)
    code, text, err = command("train", TINY, "--out", out, "--resume", "--iters", 500, "--dry-run")
    assert (code, err) == (0, "")
    words = words_of(text)
    flags = {"--train-iters": "500", "--lr": "0.0003", "--moe-strategy": "ep"}
    for flag, value in {**flags, "--load": str(out / "checkpoints")}.items():
        assert words[words.index(flag) + 1] == value
    third = TrainRequest(files, "fssdp", strategy_overrides=["slots=2"], out=out, resume=True)
    assert third.resolve().strategy.settings == {"slots": 2}
    assert TrainRequest(files, "ep", out=out).resolve().training.lr != 3e-4  # a new run keeps nothing


def test_resume_as_another_model_is_refused(refused, out):
    save_checkpoint(out, 10)
    shutil.copy(TINY, out / "config.yaml")
    for setting in ("model.hidden_size=128", "training.lr=1e-2"):
        err = refused("--resume", "--set", setting)
        assert f"--resume: {setting.split('=')[0]} is" in err
        assert "was started with" in err


def test_a_live_run_is_left_alone(refused, out):
    code = "import pathlib, sys, time; from megatron_fssdp.files import run_lock\n"
    code += "run_lock.hold(pathlib.Path(sys.argv[1]), ''); print('held', flush=True); time.sleep(1800)"
    with subprocess.Popen([sys.executable, "-c", code, out], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        (out / "metrics.jsonl").touch()
        for flag in ((), ("--overwrite",), ("--resume",)):
            assert f"a run is in progress here (process {holder.pid} on" in refused(*flag)
        holder.kill()
    assert "already holds a run" in refused()
