import importlib.metadata
import tomllib

import pytest
from packaging.requirements import Requirement

from megatron_fssdp.cli.doctor.examination import is_tested
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.support import capabilities
from megatron_fssdp.megatron_adapter.support.capabilities import TESTED_VERSIONS, check_seams
from tests.support.python_process import ROOT


def test_the_installed_megatron_has_all_seams_and_a_tested_version():
    check_seams(for_training=True)
    assert is_tested("megatron-core", importlib.metadata.version("megatron-core"))


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
def test_a_missing_seam_is_named(module, path, monkeypatch):
    monkeypatch.setattr(capabilities, "SEAMS", {module: path})
    with pytest.raises(ConfigurationError, match=path) as refusal:
        check_seams(for_training=True)
    assert capabilities.pip_install("megatron-core") in str(refusal.value)


def test_other_files_state_the_tested_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["te"]]
    stated = {requirement.name: requirement.specifier for requirement in map(Requirement, wanted)}
    stated["python"] = Requirement(f"python{project['requires-python']}").specifier
    for name, versions in TESTED_VERSIONS.items():
        assert stated[name] == Requirement(name + versions).specifier, name
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = (line.partition("==")[2] for line in constraints if line.startswith("megatron-core=="))
    assert is_tested("megatron-core", pinned)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`megatron-core{TESTED_VERSIONS['megatron-core']}`" in readme
