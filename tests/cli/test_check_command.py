"""`megatron-fssdp check`, and the same check by `train`, in processes of their own: it changes torch."""

from pathlib import Path

import pytest

from ..launch.tiny_run import ROOT, TINY, fake_data
from ..support.python_process import run_python

GPT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --num-experts 8 "
    "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 257"
)
SLOW = pytest.mark.slow
TORCHRUN = "torchrun --nproc-per-node 2 -m megatron_fssdp pretrain_gpt"


def run(*words: str, cwd: Path) -> tuple[int, str, str]:
    variables = {"MEGATRON_FSSDP_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    done = run_python("-m", "megatron_fssdp.cli.app", *words, cwd=cwd, **variables)
    return done.returncode, done.stdout, done.stderr


def test_a_right_command_is_ok(tmp_path: Path) -> None:
    code, out, err = run("check", "--", *f"{TORCHRUN} {GPT} --moe-strategy fssdp".split(), cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out == "OK: pretrain_gpt can start on 2 CPU ranks; the model and the data were not built\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (f"{TORCHRUN} {GPT} --hiden-size 3", "did you mean --hidden-size?"),
        pytest.param(
            f"{TORCHRUN} {GPT} --moe-strategy fssdp --moe-strategy-set slots=9", "0 to 8", marks=SLOW
        ),
        pytest.param(f"{TORCHRUN} {GPT} --moe-strategy ep --use-megatron-fsdp", "DDP", marks=SLOW),
        pytest.param(f"{TORCHRUN} {GPT} --tensor-model-parallel-size 3", "world size", marks=SLOW),
        pytest.param(f"MEGATRON_FSSDP_DEVICE=cuda {TORCHRUN} {GPT}", "finds no CUDA device", marks=SLOW),
        (
            f"{TORCHRUN} {GPT} --tokenizer-type TikTokenizer --tokenizer-model nowhere.json",
            "--tokenizer-model nowhere.json: ",
        ),
        ("torchrun --nproc-per-node 2 train.py", "script train.py: no such file"),
        ("python train.py", "got python train.py, wanted the command of a training"),
        ("", "got nothing after --"),
    ],
)
def test_a_wrong_command_is_one_line(command: str, wanted: str, tmp_path: Path) -> None:
    code, out, err = run("check", "--", *command.split(), cwd=tmp_path)
    assert (code, out) == (2, "")
    assert wanted in err
    assert len(err.splitlines()) == 1, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [pytest.param(["--dry-run"], marks=SLOW), []])
def test_train_checks_before_it_leaves_anything_behind(more: list[str], tmp_path: Path) -> None:
    data = fake_data(tmp_path / "data")
    words = ("train", str(TINY), "--set", f"data.path={data}", "--out", "new", *more)
    code, out, err = run(*words, "--moe-strategy-set", "slots=999999", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert "slots: got 999999" in err
    assert len(err.splitlines()) == 1, err
    assert not (tmp_path / "new").exists()
