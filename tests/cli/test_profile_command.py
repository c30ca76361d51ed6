import sys
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_fssdp.cli import app
from megatron_fssdp.config.cluster_description import load_cluster
from megatron_fssdp.launch import rank_processes
from megatron_fssdp.testing import run_ranks

from ..support.python_process import python_output

TORCHRUN = "torch.distributed.run --standalone --nproc-per-node=2"
SMALL = ("--least-bytes", "1024", "--most-bytes", "4096", "--repetitions", "1")


def on_rank(rank, world_size, words):
    """As ``python -m megatron_fssdp WORDS…`` under torchrun, with the group of ranks that is there."""
    sys.argv = ["megatron-fssdp", *words]
    there = dict.fromkeys(("init_process_group", "destroy_process_group"), lambda *_: None)
    with mock.patch.multiple(dist, **there), pytest.raises(SystemExit) as ended:
        app.main()
    return ended.value.code or 0


def test_the_command_starts_ranks_and_writes_the_cluster(command, tmp_path, monkeypatch):
    def start(words, environment):
        assert words[:7] == [sys.executable, *f"-m {TORCHRUN} -m megatron_fssdp".split()]
        return max(run_ranks(on_rank, 2, words[7:], env=environment))

    monkeypatch.setattr(rank_processes, "run_to_the_end", start)
    out = tmp_path / "pair.yaml"
    words = ("--nproc", 2, "--nodes=2", "--out", out, "--model", "gpt_moe_tiny")
    code, said, error = command("profile", *words, *SMALL)
    assert (code, error) == (0, "")
    cluster = load_cluster(out)
    assert (cluster.name, cluster.num_nodes, cluster.devices_per_node) == ("pair", 2, 1)
    assert said.count("[ 9/9]") == 1, "only one rank prints"
    assert f"wrote {out}" in said
    assert "all_to_all" in said


@pytest.mark.slow
@pytest.mark.parametrize("start", ["megatron_fssdp", f"{TORCHRUN} -m megatron_fssdp"])
def test_the_command_measures_in_processes_of_its_own(start, tmp_path):
    out = tmp_path / "pair.yaml"
    nproc = () if start.startswith(TORCHRUN) else ("--nproc", 2)
    words = (*start.split(), "profile", "--out", out, "--name", "box", *nproc, *SMALL)
    python_output("-m", *words, OMP_NUM_THREADS="1")
    assert (load_cluster(out).name, load_cluster(out).num_nodes) == ("box", 1)


@pytest.mark.parametrize(
    ("words", "variables", "wanted"),
    [
        (["--nproc", "1"], {}, "a link connects two ranks"),
        (["--nproc", "4", "--nodes", "3"], {}, "nodes: got 3, wanted a divisor of the 4 ranks"),
        ([], {}, "no ranks to measure; give --nproc N, or start the command with torchrun"),
        (["--nproc", "2", "--out", "/"], {}, "is a folder"),
        (["--nproc", "2", "--backend", "nccl"], {}, "got no visible CUDA device"),
        (["--nproc", "2", "--repetitions", "0"], {}, "--repetitions"),
        (["--nproc", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "torchrun has already started the ranks"),
        (["--nodes", "3"], {"RANK": "0", "WORLD_SIZE": "4"}, "wanted a divisor of the 4 ranks"),
        ([], {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "the same number on every machine"),
        (["--out", "/no/such/folder/c.yaml"], {"RANK": "1", "WORLD_SIZE": "1"}, ""),  # only rank 0 prints
    ],
)
def test_bad_input_ends_before_any_collective(words, variables, wanted, tmp_path, monkeypatch, command):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = () if "--out" in words else ("--out", str(tmp_path / "c.yaml"))
    code, _, error = command("profile", *out, *words)
    assert code == app.EXIT_BAD_INPUT
    assert wanted in error
    assert bool(error) == bool(wanted)
    assert not list(tmp_path.iterdir())
