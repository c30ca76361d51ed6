"""PPO by verl's workers under the plugin is that of stock, on CPU ranks."""

import os
import subprocess
import sys

import pytest

from tests.hosts.conftest import assert_balanced, assert_equal
from tests.hosts.forked_ranks import FIXED, ROOT, Run

HOST = "verl", "verl"
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
FSSDP = "--attach fssdp --settings slots=2,overlap_degree=3"
MOVING = "--attach smartmoe --settings reshard_interval=3"
MODULE = "import megatron_fssdp\n\nmegatron_fssdp.attach_from_environment()\n"
EQUAL = [  # options of both runs, those of the plugin, number of ranks
    *(("", f"--attach {name}", 2) for name in ("fssdp", "fastermoe", "auto", "quota")),
    ("", "--attach flexmoe --settings placement_interval=2,window=2", 2),
    *((options, FSSDP, 2) for options in ("--critic --reference", "--replay", "--offload", "--recompute")),
    ("--pp 2", FSSDP, 4),
    ("--pp 2 --lora", FSSDP, 4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The option for the model."""
    return f"--folder {tmp_path_factory.mktemp('training')}"


@pytest.mark.parametrize(("options", "plugin", "ranks"), EQUAL)
def test_ppo_is_that_of_stock(host, folder, options, plugin, ranks):
    run = host.run(f"{folder} {options} {plugin}", ranks=ranks)
    # A critic's small losses are means of values around 1, whose rounding counts more.
    assert_equal(run, host.stock(f"{folder} {options}", ranks), 2e-6 if "critic" in options else 1e-6)
    assert_balanced(run, steps=12)


def test_an_external_library_turns_a_strategy_on(host, folder, tmp_path):
    (file := tmp_path / "balanced_experts.py").write_text(MODULE)
    run = host.run(f"{folder} --external-lib {file}", MEGATRON_FSSDP_STRATEGY="fssdp")
    assert_equal(run, host.stock(f"{folder} "))
    assert_balanced(run, steps=12)


@pytest.mark.parametrize("options", ["", "--fully-reshardable"])
def test_checkpoints_and_exports_have_moved_experts(host, folder, tmp_path, options):
    run = host.run(f"{folder} {options} {MOVING} --save {tmp_path}")
    assert_equal(run, host.stock(f"{folder} "))
    assert "re-sharded" in run.log
    losses = host.stock(f"{folder} --steps 6").values("loss")
    for plugin in ("", MOVING):
        resumed = host.run(f"{folder} {options} {plugin} --load {tmp_path} --first-step 3")
        assert resumed.values("loss") == pytest.approx(losses[12:], rel=1e-6)


def test_workers_under_ray_train_as_stock_and_log_once(host, folder, tmp_path):
    (tmp_path / "balanced_experts.py").write_text(MODULE)
    asked = {"MEGATRON_FSSDP_STRATEGY": "fssdp", "VERL_USE_EXTERNAL_MODULES": "balanced_experts"}
    given = os.environ | FIXED | asked | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "RAY_DEDUP_LOGS": "0"}
    program = [sys.executable, str(ROOT / "tests/hosts/verl_under_ray.py"), folder.split()[1]]
    done = subprocess.run(program, env=given, capture_output=True, text=True)
    run, stock = Run([done.returncode], done.stdout + done.stderr), host.stock(f"{folder} ")
    assert not done.returncode, run.log[-3000:]
    for name in ("loss", "gradient_norm"):
        assert run.values(name) == pytest.approx(stock.values(name), rel=1e-6)
    assert run.values("experts")[-1] == pytest.approx(stock.values("experts")[-1], rel=1e-6)
    assert '"iterations": 12' in run.log
    assert run.log.count("[fssdp] strategy fssdp: installed") == 1


def test_smartmoe_wants_a_word(host, folder):
    run = host.run(f"{folder} --attach smartmoe")
    assert all(run.codes)
    assert "wanted your word that experts may move" in run.log
