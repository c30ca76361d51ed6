import pytest

from megatron_fssdp.cli.app import EXIT_BAD_INPUT
from megatron_fssdp.config.cluster_description import load_cluster

from ..support.python_process import python_output

SMALL = ("--least-bytes", "1024", "--most-bytes", "4096", "--repetitions", "1")


def run(*words):
    return python_output("-m", *words, OMP_NUM_THREADS="1", COLUMNS="120")


def test_the_command_starts_ranks_and_writes_the_cluster(tmp_path):
    out = tmp_path / "pair.yaml"
    words = ("profile", "--nproc", 2, "--nodes=2", "--out", out, "--model", "gpt_moe_tiny")
    said = run("megatron_fssdp.cli.app", *words, *SMALL)
    cluster = load_cluster(out)
    assert (cluster.name, cluster.num_nodes, cluster.devices_per_node) == ("pair", 2, 1)
    assert said.count("[ 9/9]") == 1, "only one rank prints"
    assert f"wrote {out}" in said
    assert "all_to_all" in said


@pytest.mark.slow
def test_the_command_also_runs_under_torchrun(tmp_path):
    out = tmp_path / "pair.yaml"
    words = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "megatron_fssdp", "profile")
    run(*words, "--out", out, "--name", "box", *SMALL)
    assert (load_cluster(out).name, load_cluster(out).num_nodes) == ("box", 1)


@pytest.mark.parametrize(
    ("words", "variables", "wanted"),
    [
        (["--nproc", "1"], {}, "a link connects two ranks"),
        (["--nproc", "4", "--nodes", "3"], {}, "nodes: got 3, wanted a divisor of the 4 ranks"),
        ([], {}, "no ranks to measure; give --nproc N, or start the command with torchrun"),
        (["--nproc", "2", "--out", "/proc/none/c.yaml"], {}, "got /proc, where nothing can be written"),
        (["--nproc", "2", "--out", "/"], {}, "is a folder"),
        (["--nproc", "2", "--backend", "nccl"], {}, "got no visible CUDA device"),
        (["--nproc", "2", "--repetitions", "0"], {}, "--repetitions"),
        (["--nproc", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "torchrun has already started the ranks"),
        (["--nodes", "3"], {"RANK": "0", "WORLD_SIZE": "4"}, "wanted a divisor of the 4 ranks"),
        (
            [],
            {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"},
            "wanted the same number on every machine",
        ),
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
    assert code == EXIT_BAD_INPUT
    assert wanted in error
    assert bool(error) == bool(wanted)
    assert not list(tmp_path.iterdir())
