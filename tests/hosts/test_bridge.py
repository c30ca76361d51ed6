"""Megatron-Bridge's ``pretrain()`` under the plugin is that of stock, on CPU ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import assert_balanced, assert_equal
from tests.hosts.forked_ranks import Host, Run

HOST = "bridge"
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
FSSDP = "--attach fssdp --settings slots=2,overlap_degree=3"
MOVING = "--attach smartmoe --settings reshard_interval=2"

# Options of both runs, those of the plugin, ranks.
CASES = [
    ("", "--attach ep", 2),
    ("", "--attach prophet", 2),
    ("", "--attach fastermoe", 2),
    ("", "--attach auto", 2),
    ("", "--attach flexmoe", 2),
    ("", "--attach quota", 2),
    ("", "--attach smartmoe", 2),
    ("--evaluate-every 4", FSSDP, 2),
    ("--model-config", FSSDP, 2),
    ("--grouped --sgd", FSSDP, 2),
    ("--distributed-optimizer --overlap", FSSDP, 2),
    ("--distributed-optimizer --overlap", MOVING, 2),
    ("--recompute", FSSDP, 2),
    ("--tp 2", FSSDP, 2),
    ("--pp 2 --ep 1", FSSDP, 2),
    ("--pp 2", MOVING, 4),
]


@pytest.mark.parametrize(("options", "plugin", "ranks"), CASES)
def test_a_training_is_that_of_stock(host: Host, options: str, plugin: str, ranks: int) -> None:
    run = host.run(f"{options} {plugin}", ranks=ranks)
    assert_equal(run, host.stock(options, ranks))
    assert_balanced(run)
    assert run.values("moved") == [plugin == MOVING]


def test_bf16_differs_by_rounding(host: Host) -> None:
    options = "--bf16 --distributed-optimizer --overlap --recompute"
    assert_equal(host.run(f"{options} {FSSDP}"), host.stock(options), tolerance=5e-3)


def test_the_launcher_reads_the_environment_and_records(host: Host, tmp_path: Path) -> None:
    settings = f"slots=2,overlap_degree=3,record_dir={tmp_path}"
    asked = {"MEGATRON_FSSDP_STRATEGY": "fssdp", "MEGATRON_FSSDP_SETTINGS": settings}
    run = host.run("", launcher=True, environment=asked)
    assert_equal(run, host.stock(""))
    assert_balanced(run)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one["lm_loss"] for one in records] == pytest.approx(run.values("loss"))
    assert [one["grad_norm"] for one in records] == pytest.approx(run.values("gradient_norm"))
    assert (tmp_path / "loads.npy").is_file()
    program = [sys.executable, "-m", "megatron_fssdp.cli", "report", str(tmp_path)]
    subprocess.run(program, check=True, timeout=300)


def test_torchrun_imports_the_host_after_the_plugin(host: Host) -> None:
    run = host.launch("--moe-strategy fssdp")
    assert_equal(run, host.stock(""))
    assert_balanced(run)


def test_moved_owners_are_in_checkpoints_and_go_home_for_exports(host: Host, tmp_path: Path) -> None:
    import torch

    places = tmp_path / "moved", tmp_path / "stock.pt", tmp_path / "moved.pt"
    stock = host.run(f"--export {places[1]} --save {tmp_path / 'stock'}")
    run = host.run(f"{MOVING} --save {places[0]} --save-every 8 --export {places[2]}")
    assert_equal(run, stock)
    assert run.values("moved") == [True]
    ours, theirs = (torch.load(place) for place in places[1:])
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-7) for name in theirs)
    text = (places[0] / "iter_0000008" / "run_config.yaml").read_text()
    assert "megatron_fssdp" not in text
    straight, options = host.stock("--steps 12").lines, f"--load {places[0]} --steps 12"
    for resumed in (host.run(options), host.run(f"{options} {MOVING}")):
        assert resumed.values("loss") == pytest.approx(_losses(straight)[8:], rel=1e-6)
    resumed = host.run(f"--load {tmp_path / 'stock'} --steps 12 {FSSDP}")
    assert resumed.values("loss") == pytest.approx(_losses(straight)[8:], rel=1e-6)


def test_lora_on_attention_resumes_from_adapters(host: Host, tmp_path: Path) -> None:
    host.run(f"--save {tmp_path / 'base'}")
    options = f"--lora attention --pretrained {tmp_path / 'base'}"
    straight = host.stock(f"{options} --steps 12")
    run = host.run(f"{options} {MOVING} --save {tmp_path / 'adapters'} --save-every 8")
    assert run.values("loss") == pytest.approx(_losses(straight.lines)[:8], rel=1e-6)
    resumed = host.run(f"{options} {MOVING} --load {tmp_path / 'adapters'} --steps 12")
    assert resumed.values("loss") == pytest.approx(_losses(straight.lines)[8:], rel=1e-6)
    refused = host.run(f"--lora experts --pretrained {tmp_path / 'base'} --moe-strategy fssdp", launcher=True)
    _assert_refused(refused, "LoRA adapters")


@pytest.mark.parametrize(
    ("options", "launcher", "reason"),
    [
        ("--fsdp --moe-strategy fssdp", True, "Megatron"),
        (f"--fsdp --host {FSSDP}", True, "fully sharded data parallelism"),
    ],
)
def test_what_cannot_be_served_is_one_line(host: Host, options: str, launcher: bool, reason: str) -> None:
    _assert_refused(host.run(options, launcher=launcher), reason)


def test_options_of_checkpoints_are_replaced_if_the_host_is_given(host: Host, tmp_path: Path) -> None:
    run = host.run(f"--host --distributed-optimizer {MOVING} --save {tmp_path}")
    assert run.values("fully_reshardable") == [True]
    assert_equal(run, host.stock("--distributed-optimizer"))


def _assert_refused(run: Run, reason: str) -> None:
    assert all(run.codes), run.codes
    assert not run.values("step")
    assert run.error_lines, run.log[-3000:]
    assert all(reason in line for line in run.error_lines)


def _losses(lines: list) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]
