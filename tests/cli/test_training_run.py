import argparse
import textwrap
import typing

import numpy as np
import pytest

from megatron_fssdp.config.loading import load_yaml, validate
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.records.recorded_run import load

from ..support.python_process import run_python

RUN = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, seq_length: 32, num_experts: 4,
        moe_layer_freq: 2, add_bias_linear: false}
parallelism: {nproc_per_node: 1, expert_model_parallel_size: 1}
training: {train_iters: 3, global_batch_size: 4, save_checkpoints: false}
strategy: {name: fssdp, settings: {slots: 1}}
"""

BERT = """
model: {family: bert, num_layers: 2, hidden_size: 32, num_attention_heads: 2, seq_length: 32,
        num_experts: 4, moe_layer_freq: 2}
parallelism: {nproc_per_node: 2, expert_model_parallel_size: 2}
training: {train_iters: 3, global_batch_size: 4, eval_interval: 2, eval_iters: 1}
data: {split: "50,50,0"}
strategy: {name: fssdp, settings: {slots: 1}}
"""


def run_newly(*arguments):
    """Run `megatron-fssdp ARGS…` in a new process."""
    ended = run_python("-m", "megatron_fssdp.cli.app", *arguments, MEGATRON_FSSDP_DEVICE="cpu")
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def done(command, tmp_path):
    """Run `megatron-fssdp ARGS…`, require success and return standard output."""

    def run(*arguments, runs=command):
        code, *said = runs(*arguments)
        log = tmp_path / "run" / "log.txt"
        assert code == 0, "".join(said) + (log.read_text()[-4000:] if log.exists() else "")
        return said[0]

    return run


def test_a_run_trains_and_leaves_its_records(done, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    data, out = tmp_path / "data", tmp_path / "run"
    done("data", "build", tmp_path / "text.txt", "--tokenizer", "bytes", "--out", data)
    output = done(
        *("train", tmp_path / "run.yaml", "--set", f"data.path={data}"),
        *("--set", "training.tensorboard=true", "--out", out),
    )
    assert "iteration 3/3" in output
    assert "load max/mean" in output
    last_line = output.strip().splitlines()[-1]
    assert last_line.startswith("done: 3 iterations, loss ")
    assert last_line.endswith(f"; next: megatron-fssdp report {out}")

    run, loads = load(out), read_loads(out)
    assert run.strategy == "fssdp"
    assert run.iterations.tolist() == loads.iterations.tolist() == [1, 2, 3]
    assert run.layers == loads.layers.tolist()
    assert np.isfinite(run.losses).all()
    # The device routes 4 samples of 32 tokens to 2 experts each.
    assert loads.counts_ILDE.shape == (3, 1, 1, 4)
    assert (loads.counts_ILDE.sum(axis=3) == 4 * 32 * 2).all()
    done("report", out)
    resolved = validate(RunConfig, load_yaml(out / "config.yaml"), "config.yaml")
    assert resolved.data.path == data
    assert {path.name for path in out.iterdir()} == {
        *("config.yaml", "overrides.yaml", "metrics.jsonl", "loads.npy", "placements.npy", "log.txt"),
        *("micro_batch_loads.npy", "tensorboard", "report.html", ".lock"),
    }


@pytest.mark.slow
def test_a_bert_trains_resumes_and_is_compared_and_simulated(done, tmp_path):
    (tmp_path / "run.yaml").write_text(BERT)
    data, out, sources = tmp_path / "data", tmp_path / "run", (argparse, typing, textwrap)
    files = [module.__file__ for module in sources]
    done("data", "build", *files, "--tokenizer", "wordpiece", "--vocab-size", 500, "--out", data)
    words = ("train", tmp_path / "run.yaml", "--set", f"data.path={data}", "--out", out)
    assert "iteration 3/3" in done(*words, runs=run_newly)
    assert "iteration 5/5" in done(*words, "--resume", "--iters", 5, runs=run_newly)

    run, loads = load(out), read_loads(out)
    assert run.iterations.tolist() == [1, 2, 3, 4, 5]
    assert np.isfinite(run.losses).all()
    assert loads.counts_ILDE.shape == (5, 1, 2, 4)
    assert (loads.counts_ILDE.sum(axis=3) == 2 * 32 * 2).all()
    log = (out / "log.txt").read_text()
    assert "sop loss" in log
    assert "validation loss at iteration 2" in log
    done("report", out)
    simulated = ("simulate", "--loads", out, "--cluster", "hecate-a", "--model", out / "config.yaml")
    assert "fssdp" in done(*simulated, "--out", tmp_path / "what-if")
    assert "OK" in done("doctor", "--config", out / "config.yaml")
