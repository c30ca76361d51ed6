"""ms-swift's ``megatron sft`` under the plugin is that of stock, on CPU ranks."""

import pytest

from tests.hosts.conftest import assert_balanced, assert_equal

HOST = "swift", "mcore_bridge"
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
MOVING = "--attach smartmoe --settings reshard_interval=2"
PLUGINS = [MOVING, "--attach prophet", "--attach flexmoe"]
FSSDP = "--attach fssdp --settings slots=2"
ADAPTERS = """--tuner_type lora --target_modules all-linear --lora_rank 4 --lora_alpha 8 --lora_dropout 0
    --merge_lora true"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The option for the model, the data and exported models."""
    return f"--folder {tmp_path_factory.mktemp('training')}"


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_training_and_its_export_are_those_of_stock(host, folder, plugin):
    run = host.run(f"{folder} {plugin}")
    assert_equal(run, host.stock(f"{folder} "))
    assert_balanced(run)
    assert any(run.values("moved")) == (plugin == MOVING)


@pytest.mark.parametrize(
    ("options", "plugin"),
    # DPO's reference is the model without its adapters, which computes in the middle of an iteration.
    [
        *(("", plugin) for plugin in (FSSDP, "--attach fastermoe", "--attach quota")),
        ("--rlhf_type dpo", FSSDP),
    ],
)
def test_adapters_of_experts_are_those_of_stock(host, folder, options, plugin):
    options = f"{folder} {ADAPTERS} {options}"
    run = host.run(f"{options} {plugin}")
    assert_equal(run, host.stock(options))
    assert any(".lora_B." in name for name in run.values("experts")[-1])
    assert_balanced(run)


def test_an_external_plugin_turns_a_strategy_on(host, folder, tmp_path):
    (file := tmp_path / "balanced.py").write_text(
        "import megatron_fssdp\n\nmegatron_fssdp.attach_from_environment()\n"
    )
    run = host.run(f"{folder} --external_plugins {file}", MEGATRON_FSSDP_STRATEGY="fssdp")
    assert_equal(run, host.stock(f"{folder} "))
    assert_balanced(run)


def test_torchrun_imports_the_host_after_the_plugin(host, folder):
    run = host.launch(folder, MEGATRON_FSSDP_STRATEGY="fssdp")
    assert_equal(run, host.stock(f"{folder} "))
    assert_balanced(run)
