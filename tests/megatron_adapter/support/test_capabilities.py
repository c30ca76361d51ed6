"""The installed Megatron has all seams of the plugin, a missing seam is named, and versions are compared."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.support.tested_versions import TESTED_VERSIONS, is_tested, requirement_of

ROOT = Path(__file__).parents[3]


def test_the_installed_megatron_has_all_seams() -> None:
    from megatron_fssdp.megatron_adapter.support.capabilities import check_seams

    check_seams(for_training=True)


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("megatron.core.transformer.no_such_module", "Layer"),
        ("megatron.core.transformer.transformer_layer", "TransformerLayer.no_such_method"),
        # Named by its instances only, like the attributes that are there.
        ("megatron.core.distributed", "DistributedDataParallel.no_such_attribute"),
        ("megatron.training.checkpointing", "dist_checkpointing.no_such_function"),
    ],
)
def test_a_missing_seam_is_named(module: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_fssdp.megatron_adapter.support import capabilities

    seam = capabilities.Seam(module, path, "does something", "every run")
    monkeypatch.setattr(capabilities, "SEAMS", (seam,))
    with pytest.raises(ConfigurationError, match=path) as refusal:
        capabilities.check_seams(for_training=True)
    assert requirement_of("megatron-core") in str(refusal.value)


def test_the_tested_range_is_stated_in_one_place() -> None:
    """Scripts and README state the tested range, which a test below compares with pyproject.toml."""
    tested = Requirement(requirement_of("megatron-core"))
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (installed_by_scripts,) = [
        line.partition("==")[2] for line in constraints.splitlines() if line.startswith(f"{tested.name}==")
    ]
    assert tested.specifier.contains(installed_by_scripts)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`{requirement_of('megatron-core')}`" in readme


def test_the_installed_megatron_is_in_the_tested_range() -> None:
    tested = Requirement(requirement_of("megatron-core"))
    assert tested.specifier.contains(importlib.metadata.version(tested.name))


def test_the_tested_ranges_equal_those_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["te"]]
    stated = {one.name: one.specifier for one in map(Requirement, wanted)}
    stated["python"] = Requirement(f"python{project['requires-python']}").specifier
    for name, versions in TESTED_VERSIONS.items():
        assert stated[name] == Requirement(name + versions).specifier, name


@pytest.mark.parametrize(
    ("distribution", "version", "expected"),
    [
        ("torch", "2.6.0a0+ecf3bae.nv25.01", True),  # NVIDIA's containers
        ("torch", "2.6.0+cu124", True),
        ("torch", "2.5.1", False),
        ("megatron-core", "0.18.1", False),
        ("megatron-core", "0.20.9", True),
        ("megatron-core", "0.21.0rc0", False),
        ("megatron-core", "0.19.2+6d5d9bf", True),
        ("python", "3.12.0", True),
        ("python", "3.11.9", False),
        ("torch", "from source", None),
    ],
)
def test_versions_are_compared_without_their_suffixes(
    distribution: str, version: str, expected: bool | None
) -> None:
    assert is_tested(distribution, version) is expected
