"""ms-swift's ``megatron sft`` under the plugin is that of stock, on CPU ranks."""

from pathlib import Path

import pytest

from tests.hosts.conftest import assert_balanced, assert_equal
from tests.hosts.forked_ranks import Host

HOST = "swift"
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
LORA = "--tuner_type lora --target_modules linear_qkv linear_proj --merge_lora true"
FSSDP = "--attach fssdp --settings slots=2,overlap_degree=3"
MOVING = "--attach smartmoe --settings reshard_interval=2"
ASKED = {"MEGATRON_FSSDP_STRATEGY": "fssdp", "MEGATRON_FSSDP_SETTINGS": "slots=2,overlap_degree=3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, the data, and exported models."""
    return tmp_path_factory.mktemp("training")


@pytest.mark.parametrize(
    ("options", "plugin"),
    [("", FSSDP), ("", MOVING), ("", "--attach prophet"), ("", "--attach flexmoe"), (LORA, MOVING)],
)
def test_a_training_and_its_export_are_those_of_stock(
    host: Host, folder: Path, options: str, plugin: str
) -> None:
    stock = host.stock(f"--folder {folder} {options}")
    run = host.run(f"--folder {folder} {options} {plugin}")
    assert_equal(run, stock)
    assert_balanced(run)
    assert run.values("moved") == [plugin == MOVING]


def test_an_external_plugin_turns_a_strategy_on(host: Host, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "balanced_experts.py"
    file.write_text("import megatron_fssdp\n\nmegatron_fssdp.attach_from_environment()\n")
    run = host.run(f"--folder {folder} --external_plugins {file}", environment=ASKED)
    assert_equal(run, host.stock(f"--folder {folder} "))
    assert_balanced(run)


def test_torchrun_imports_the_host_after_the_plugin(host: Host, folder: Path) -> None:
    run = host.launch(f"--folder {folder} --moe-strategy fssdp")
    assert_equal(run, host.stock(f"--folder {folder} "))
    assert_balanced(run)
