"""The doctor's verdicts on versions and installed packages."""

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_fssdp.megatron_adapter.diagnosis import installed_packages
from megatron_fssdp.megatron_adapter.diagnosis.finding import Verdict
from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import (
    InstalledPackage,
    look_for,
    look_for_apex,
)
from megatron_fssdp.megatron_adapter.diagnosis.package_checks import (
    check_apex,
    check_megatron,
    check_python,
    check_torch,
    check_transformer_engine,
)
from megatron_fssdp.megatron_adapter.support.tested_versions import TESTED_VERSIONS, is_tested
from tests.megatron_adapter.diagnosis.machine_examples import HERE, NOTE, OK, PROBLEM


def test_the_tested_ranges_equal_those_of_the_project_file() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    stated = {
        requirement.name: requirement.specifier
        for requirement in map(
            Requirement, [*project["dependencies"], *project["optional-dependencies"]["te"]]
        )
    }
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


def test_the_advice_for_an_old_version_names_the_wanted_ones() -> None:
    assert ">=3.12" in check_python("3.10.2", "/usr/bin/python3").advice
    assert "pip install 'torch>=2.6'" in check_torch(InstalledPackage("2.4.0", HERE)).advice


@pytest.mark.parametrize(
    ("package", "verdict", "words"),
    [
        (InstalledPackage(), PROBLEM, "pip install 'megatron-core>=0.19,<0.21'"),
        (InstalledPackage("0.19.2", HERE, "ImportError: libx"), PROBLEM, "fix the cause"),
        (InstalledPackage("0.18.0", HERE), NOTE, "megatron-core >=0.19,<0.21"),
        (InstalledPackage(None, HERE), NOTE, "compare the first losses"),
        (InstalledPackage("0.20.0", HERE), OK, ""),
    ],
)
def test_the_verdict_on_megatron_follows_from_its_installation(
    package: InstalledPackage, verdict: Verdict, words: str
) -> None:
    finding = check_megatron(package)
    assert (finding.verdict, words in finding.advice) == (verdict, True)


@pytest.mark.parametrize(
    ("engine", "has_gpus", "verdict"),
    [
        (InstalledPackage(), False, OK),
        (InstalledPackage(), True, NOTE),
        (InstalledPackage("2.5.0+abc", HERE), True, OK),
        (InstalledPackage("1.13.0", HERE), True, NOTE),
        (InstalledPackage("2.5.0", HERE, "ImportError: undefined symbol"), True, PROBLEM),
    ],
)
def test_the_verdict_on_transformer_engine_follows_from_its_installation(
    engine: InstalledPackage, has_gpus: bool, verdict: Verdict
) -> None:
    assert check_transformer_engine(engine, has_gpus).verdict is verdict


def test_an_unrelated_apex_is_told_from_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    unrelated = look_for_apex()
    assert (unrelated.location, unrelated.is_nvidias) == (package, False)
    finding = check_apex(unrelated)
    assert finding.verdict is NOTE
    assert "unrelated" in finding.found
    assert "pip uninstall apex" in finding.advice

    (package / "normalization").mkdir()
    assert look_for_apex().is_nvidias
    assert "CUDA extensions" in check_apex(look_for_apex()).found


def test_a_missing_apex_is_not_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_packages.importlib.util, "find_spec", lambda name: None)
    assert check_apex(look_for_apex()).verdict is OK


def test_a_package_that_fails_on_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_thing.py").write_text(
        "__version__ = '1.0'\nraise OSError('libfoo.so.1:\\nnot found')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    package = look_for("broken_thing", "broken-thing")
    assert (package.location, package.error, package.works) == (tmp_path, "OSError: libfoo.so.1:", False)
    assert look_for("no_such_parent.child", "no-such-thing") == InstalledPackage()
    assert look_for("json", "no-such-thing").works
