"""The versions with which the plugin is tested."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_fssdp.megatron_adapter.support.tested_versions import TESTED_VERSIONS, is_tested


def test_the_tested_ranges_equal_those_of_the_project_file() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
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
