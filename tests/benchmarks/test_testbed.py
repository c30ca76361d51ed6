import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.testbed.__main__ import counts_of, parser
from benchmarks.testbed.measurement import Sample
from benchmarks.testbed.nodes import processes
from benchmarks.testbed.nodes.links import Nodes, parse_rate, payload_bytes_per_s
from benchmarks.testbed.report import AgainstBest, against_best, control_difference, heat, summaries, table
from benchmarks.testbed.stack_inputs import LayerInput, StackSize
from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape
from tests.support.python_process import ROOT, is_running

SIZES = {"nodes": 2, "ranks-per-node": 1, "hidden": 16, "ffn": 32, "tokens": 32, "experts": 8, "layers": 2}
TOY = [f"--{key}={value}" for key, value in SIZES.items()] + ["--workloads=W3", "--warm-up=2"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_drawn_tokens_have_the_workloads_counts(name):
    counts_DE = WORKLOADS[name].counts(WorkloadShape(4, 8, 32, 2, 4))[3]
    maps = []
    for device, counts_E in enumerate(counts_DE):
        drawn = LayerInput.draw(counts_E, int(counts_E.sum()) // 2, np.random.default_rng(device))
        assert drawn.routing_map.sum(dim=0).tolist() == counts_E.tolist()
        assert set(drawn.routing_map.sum(dim=1).tolist()) == {2}
        np.testing.assert_allclose(drawn.probs.sum(dim=1), 1, rtol=1e-6)
        assert not drawn.probs[~drawn.routing_map].any()
        maps.append(drawn.routing_map)
    if name == "W0":
        assert not maps[0].equal(maps[1])  # ranks draw different tokens


def sample(workload, variant, repetition, seconds):
    pair, loads = (0, 0), (1.0, 2.0 + repetition)
    return Sample(
        *(workload, variant, repetition, 0, seconds, 0.0, (2.0, 0.0), (0.5, 0.0), pair, pair, 0, 0), loads
    )


def test_speed_ups_are_paired_and_the_ceiling_is_the_best_balanced_median():
    seconds = {
        ("W0", "none"): [1.0, 1.0, 1.0],
        ("W0", "fssdp"): [0.8, 0.9, 0.7],
        ("W1", "none"): [2.0, 4.0, 3.0],
        ("W1", "none again"): [2.0, 4.5, 3.3],
        ("W1", "fssdp"): [1.0, 1.0, 1.0],
    }
    cells = summaries([sample(*name, *drawn) for name, took in seconds.items() for drawn in enumerate(took)])
    by_cell = {(cell["workload"], cell["variant"]): cell for cell in cells}
    skewed = by_cell["W1", "fssdp"]
    assert skewed["speed_up"] == [2.5, 3.0, 3.5]
    assert skewed["percent_of_ceiling"] == pytest.approx(80.0)
    assert skewed["spag_hidden_share"] == 0.75
    assert skewed["sprs_hidden_share"] is None
    assert skewed["load_max_over_mean"] == pytest.approx([1.5, 3.95])  # of 1, 1, 1, 2, 3, 4
    assert "| 1.50 / 3.95 |" in table(cells, dict.fromkeys(("W0", "W1"), heat(np.ones((1, 1, 1, 2, 2)))))
    assert control_difference(cells, "none again") == {"W1": pytest.approx(0.1)}


def test_auto_is_compared_with_the_fastest_strategy_of_all_iterations():
    """The best median would be the wrong reference: c is fast in most iterations and very slow in one."""
    seconds = {"none": [8, 8, 8], "a": [4, 4, 4], "c": [1, 1, 20], "auto": [5, 4, 4], "none again": [1, 1, 1]}
    samples = [sample("W1", name, *drawn) for name, took in seconds.items() for drawn in enumerate(took)]
    assert against_best(samples, "auto", ["none again"]) == [AgainstBest("W1", "a", 13 / 12, 24 / 13)]
    assert against_best([one for one in samples if one.variant == "auto"], "auto") == []


def test_workloads_divide_the_tokens_of_an_iteration_among_micro_batches(tmp_path):
    recorded_IZLDE = np.random.default_rng(0).integers(1, 9, (3, 4, 1, 2, 8))
    np.savez(tmp_path / "any.npz", counts_IZLDE=recorded_IZLDE)
    size = StackSize(2, 8, 2, 16, 32, 64)

    def counts(name, *options):
        given = parser().parse_args(["--out", "unused", "--replay-from=1", *options])
        counts_LIZDE = counts_of(given, name, size, 4, 2)
        assert np.all(counts_LIZDE.sum(axis=(2, 4)) == 64 * 2)
        return counts_LIZDE

    assert counts("W1").shape == (2, 2, 1, 4, 8)
    equal = counts("W1", "--micro-batches=2")
    assert np.array_equal(equal[:, :, 0], equal[:, :, 1])
    for name in ("drift", "jump-micro"):
        assert counts(name).shape == (2, 2, 4, 4, 8)
        assert not np.array_equal(*counts(name, "--micro-batches=2").swapaxes(0, 2)[:2, 0])
    replayed = counts("replay-micro", f"--loads={tmp_path / 'any.npz'}")
    of_sources = recorded_IZLDE[1:, :, 0].repeat(2, axis=2)  # each stands for two devices
    shares, wanted = (counts / counts.sum(axis=-1, keepdims=True) for counts in (replayed[1], of_sources))
    assert shares == pytest.approx(wanted, abs=2 / 32)
    with pytest.raises(ValueError, match="tokens as a multiple of micro-batches"):
        counts("drift", "--micro-batches=3")


def test_link_rates_are_parsed():
    assert parse_rate("400mbit") == 400_000_000
    assert payload_bytes_per_s(400_000_000) == pytest.approx(47.8e6, rel=1e-3)
    with pytest.raises(ValueError, match="400mbit"):
        parse_rate("400")
    assert len({Nodes.address(node) for node in range(600)}) == 600


def run_testbed(*arguments):
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.testbed", *arguments]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **output)


@pytest.mark.slow
def test_two_ranks_are_measured_over_loopback(tmp_path):
    moving = "smartmoe:reshard_interval=1;window=1,flexmoe:placement_interval=1;window=1"
    strategies = f"none,ep,fssdp,quota,{moving}"
    options = ["--loopback", "--repetitions=2", f"--strategies={strategies}", "--workloads=W3,jump-micro"]
    files = [f"--out={tmp_path}", f"--result={tmp_path / 'result.json'}"]
    process = run_testbed(*TOY, *options, *files)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    record = json.loads((tmp_path / "testbed.json").read_text())
    by_cell = {(cell["workload"], cell["variant"]): cell for cell in record["summaries"]}
    variants = [*strategies.split(","), "none again"]
    assert set(by_cell) == {(w, v) for w in ("W0", "W3", "jump-micro") for v in variants}
    assert len(record["samples"]) == 2 * len(by_cell)
    assert max(record["worst_difference_from_ep"].values()) <= 1e-5
    num_loads = {sample["workload"]: len(sample["loads"]) for sample in record["samples"]}
    assert num_loads == {"W0": 2, "W3": 2, "jump-micro": 4 * 2}
    skewed, ep, none = (by_cell["W3", variant] for variant in ("fssdp", "ep", "none"))
    assert skewed["replica_bytes"] >= 2 * 2 * 16 * 32 * 4  # at least one expert of each of the two layers
    assert skewed["transfer_bytes_between_nodes"] > 0
    sent = "dispatch_bytes_between_nodes"
    assert skewed[sent] < ep[sent] == none[sent]
    assert "| W3 |" in (tmp_path / "testbed.md").read_text()
    written = json.loads((tmp_path / "result.json").read_text())
    assert [row[:2] for row in written["rows"]] == sorted(map(list, by_cell))


def namespaces_in_use():
    """Network namespaces that contain a process."""
    used = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                used.add(os.readlink(entry / "ns" / "net"))
    return used


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_processes_or_networks(by, tmp_path):
    refusal = processes.namespaces_refusal()
    if refusal is not None:
        pytest.skip(f"no namespaces here: {refusal}")
    interfaces = sorted(os.listdir("/sys/class/net"))
    process = run_testbed("--repetitions=1000", *TOY, "--out", str(tmp_path))
    for line in process.stdout:
        if "warm-up" in line:
            break
    below = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    own = {os.readlink(f"/proc/{pid}/ns/net") for pid in below} - {os.readlink("/proc/self/ns/net")}
    assert len(below) >= 4  # unshare, the first process inside, two ranks
    assert len(own) >= 3  # the switch and two nodes
    process.send_signal(by)
    process.wait()
    while own & namespaces_in_use() or any(map(is_running, below)):  # or pytest's time limit ends the test
        time.sleep(0.1)
    assert sorted(os.listdir("/sys/class/net")) == interfaces
    assert not list(Path("/run/netns").glob("node*"))
    process.stdout.close()
