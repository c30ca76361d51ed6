"""Megatron-Bridge's ``pretrain()`` under the plugin is that of stock, on CPU ranks."""

import json

import pytest
import torch

from tests.hosts.conftest import assert_balanced, assert_equal

HOST = "bridge", "megatron.bridge"
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
FSSDP = "--attach fssdp --settings slots=2,overlap_degree=3"
MOVING = "--attach smartmoe --settings reshard_interval=2"
OVERLAPS = "--distributed-optimizer --overlap"
EQUAL = [  # options of both runs, those of the plugin, number of ranks
    *(("", f"--attach {name}", 2) for name in ("ep", "prophet", "fastermoe", "auto", "flexmoe", "quota")),
    *((options, FSSDP, 2) for options in ("--evaluate-every 4", "--model-config", "--grouped --sgd")),
    *((options, FSSDP, 2) for options in (OVERLAPS, "--recompute", "--tp 2")),
    (OVERLAPS, "--attach flexmoe --settings placement_interval=2,window=2", 2),
    ("", MOVING, 2),
    ("--pp 2", FSSDP, 4),
    ("--pp 2", MOVING, 4),
]
ADAPTERS = [  # The same, for adapters of each expert, and for those that all experts of a layer share.
    ("--lora experts", "--attach fastermoe", 2),
    ("--lora experts", FSSDP, 4),
    ("--lora experts", MOVING, 2),
    ("--lora experts --grouped", FSSDP, 4),
    ("--lora canonical", MOVING, 2),
    ("--lora experts --grouped", "--attach quota", 2),
]


@pytest.mark.parametrize(("options", "plugin", "ranks"), EQUAL)
def test_a_training_is_that_of_stock(host, options, plugin, ranks):
    run = host.run(f"{options} {plugin}", ranks=ranks)
    assert_equal(run, host.stock(options, ranks))
    assert_balanced(run)
    assert run.values("moved") == [plugin == MOVING]


def test_bf16_differs_by_rounding(host):
    options = f"--bf16 --recompute {OVERLAPS}"
    assert_equal(host.run(f"{options} {FSSDP}"), host.stock(options), tolerance=5e-3)


def test_the_launcher_reads_the_environment_and_records(host, tmp_path):
    settings = f"slots=2,overlap_degree=3,record_dir={tmp_path}"
    run = host.run("", launcher=True, MEGATRON_FSSDP_STRATEGY="fssdp", MEGATRON_FSSDP_SETTINGS=settings)
    assert_equal(run, host.stock(""))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for key, name in (("lm_loss", "loss"), ("grad_norm", "gradient_norm")):
        assert [record[key] for record in records] == pytest.approx(run.values(name))
    assert (tmp_path / "loads.npy").is_file()


def test_torchrun_imports_the_host_after_the_plugin(host):
    run = host.launch("--moe-strategy fssdp")
    assert_equal(run, host.stock(""))
    assert_balanced(run)


@pytest.mark.parametrize("options", ["", OVERLAPS, f"--host {OVERLAPS}"])
def test_checkpoints_and_exports_have_moved_experts(host, tmp_path, options):
    saved, files = tmp_path / "saved", (tmp_path / "stock.pt", tmp_path / "moved.pt")
    both = options.removeprefix("--host ")
    stock = host.run(f"{both} --export {files[0]}")
    run = host.run(f"{options} {MOVING} --save {saved} --save-every 8 --export {files[1]}")
    assert_equal(run, stock)
    theirs, ours = map(torch.load, files)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-7)
    assert "fssdp" not in (saved / "iter_0000008/run_config.yaml").read_text().replace(str(tmp_path), "")
    losses = host.stock(f"{both} --steps 12").values("loss")
    for plugin in ("", MOVING):
        resumed = host.run(f"{both} {plugin} --load {saved} --steps 12")
        assert resumed.values("loss") == pytest.approx(losses[8:], rel=1e-6)


@pytest.fixture(scope="module")
def base(host, tmp_path_factory):
    """The checkpoint of a model that gets adapters."""
    host.run(f"--save {(folder := tmp_path_factory.mktemp('base'))}")
    return folder


@pytest.mark.parametrize(("options", "plugin", "ranks"), ADAPTERS)
def test_adapters_of_experts_are_those_of_stock(host, base, options, plugin, ranks):
    options = f"{options} --pretrained {base}"
    run = host.run(f"{options} {plugin}", ranks=ranks)
    assert_equal(run, host.stock(options, ranks))
    assert_balanced(run)


def test_a_stock_checkpoint_loads(host, base):
    resumed = host.run(f"{FSSDP} --load {base} --steps 12")
    assert resumed.values("loss") == pytest.approx(host.stock("--steps 12").values("loss")[8:], rel=1e-6)


@pytest.mark.parametrize("adapters", ["attention", "experts", "experts --grouped"])
def test_adapters_resume(host, base, tmp_path, adapters):
    options = f"--lora {adapters} --pretrained {base}"
    straight = host.stock(f"{options} --steps 12").values("loss")
    run = host.run(f"{options} {MOVING} --save {tmp_path} --save-every 8")
    resumed = host.run(f"{options} {MOVING} --load {tmp_path} --steps 12")
    assert run.values("moved") == [True]
    assert run.values("loss") + resumed.values("loss") == pytest.approx(straight, rel=1e-6)


def test_packed_adapters_are_refused_in_one_line(host, base):
    for kind in ("each-expert", "shared-outer"):
        options = f"--lora {kind} --grouped --pretrained {base} --moe-strategy fssdp"
        _assert_refused(host, options, "share_expert_adapters")


def test_fully_sharded_models_are_refused_in_one_line(host):
    _assert_refused(host, "--fsdp --moe-strategy fssdp", "DistributedDataParallel")
    _assert_refused(host, f"--fsdp --host {FSSDP}", "fully sharded data parallelism")


def _assert_refused(host, options, reason):
    run = host.run(options, launcher=True)
    assert 2 in run.codes
    assert all(run.codes)
    assert not run.values("step")
    lines = [line for line in run.log.splitlines() if "[fssdp] error" in line]
    assert lines
    assert all(reason in line for line in lines)
