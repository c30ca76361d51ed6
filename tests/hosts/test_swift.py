"""ms-swift's ``megatron sft`` under the plugin is that of stock, on CPU ranks."""

import pytest

from tests.hosts.conftest import assert_balanced, assert_equal

HOST = "swift", "mcore_bridge"
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
MOVING = "--attach smartmoe --settings reshard_interval=2"
PLUGINS = [MOVING, "--attach prophet", "--attach flexmoe"]


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
