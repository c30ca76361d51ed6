"""`megatron-fssdp check`, and the same check by `train`, in forked processes: it changes torch."""

import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
import torch.distributed as dist

from megatron_fssdp.cli import app
from megatron_fssdp.testing import run_ranks

from ..launch.tiny_run import ROOT, TINY, fake_data
from ..support.python_process import run_python
from ..support.training_preload import TRAINING_PRELOAD

GPT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --num-experts 8 "
    "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 257"
)
TORCHRUN = "torchrun --nproc-per-node 2 -m megatron_fssdp pretrain_gpt"


def on_rank(rank, world_size, words, folder):
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.chdir(folder)
    sys.argv = ["megatron-fssdp", *words]
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        app.main()
    return ended.value.code or 0, out.getvalue(), err.getvalue()


def run(*words, cwd):
    variables = {"MEGATRON_FSSDP_DEVICE": "cpu"}
    (ended,) = run_ranks(on_rank, 1, list(words), cwd, env=variables, preload=TRAINING_PRELOAD)
    return ended


def run_newly(*words, cwd):
    variables = {"MEGATRON_FSSDP_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    done = run_python("-m", "megatron_fssdp.cli.app", *words, cwd=cwd, **variables)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("runs", [run, pytest.param(run_newly, marks=pytest.mark.slow)])
def test_a_right_command_is_ok(runs, tmp_path):
    code, out, err = runs("check", "--", *f"{TORCHRUN} {GPT} --moe-strategy fssdp".split(), cwd=tmp_path)
    said = "OK: pretrain_gpt can start under fssdp on 2 CPU ranks; the model and the data were not built\n"
    assert (code, out, err) == (0, said, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (f"{TORCHRUN} {GPT} --hiden-size 3", "did you mean --hidden-size?"),
        (f"{TORCHRUN} {GPT} --moe-strategy fssdp --moe-strategy-set slots=9", "0 to 8"),
        (f"{TORCHRUN} {GPT} --moe-strategy ep --use-megatron-fsdp", "DDP"),
        (f"{TORCHRUN} {GPT} --tensor-model-parallel-size 3", "world size"),
        (f"MEGATRON_FSSDP_DEVICE=cuda {TORCHRUN} {GPT}", "finds no CUDA device"),
        (f"{TORCHRUN} {GPT} --tokenizer-type TikTokenizer --tokenizer-model nowhere.json", "nowhere.json"),
        ("torchrun --nproc-per-node 2 train.py", "script train.py: no such file"),
        ("torchrun -m megatron_fssdp -m some.module", "got module some.module, wanted a script"),
        ("python train.py", "got python train.py, wanted the command of a training"),
        ("", "got nothing after --"),
    ],
)
def test_a_wrong_command_is_one_line(command, wanted, tmp_path):
    code, out, err = run("check", "--", *command.split(), cwd=tmp_path)
    assert (code, out) == (2, "")
    assert wanted in err
    assert len(err.splitlines()) == 1, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("imported", "command", "wanted"),
    [
        ("megatron.bridge", "-m megatron_fssdp train.py --recipe x", "not of Megatron-LM, wanted a script"),
        ("megatron.training", f"train.py {GPT}", "without the plugin; put -m megatron_fssdp before it"),
    ],
)
def test_a_script_of_another_host_or_without_the_plugin_is_refused(imported, command, wanted, tmp_path):
    (tmp_path / "train.py").write_text(f"import {imported}")
    code, out, err = run("check", "--", "torchrun", *command.split(), cwd=tmp_path)
    assert (code, out) == (2, "")
    assert wanted in err


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_train_checks_before_it_leaves_anything_behind(more, tmp_path):
    data = fake_data(tmp_path / "data")
    words = ("train", str(TINY), "--set", f"data.path={data}", "--out", "new", *more)
    code, out, err = run(*words, "--moe-strategy-set", "slots=999999", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert "slots: got 999999" in err
    assert len(err.splitlines()) == 1, err
    assert not (tmp_path / "new").exists()
