"""The sdist carries its version, and the wheel has all files that users need.

`scripts/smoke_test_package.sh` makes both with `python -m build`, in an empty environment.
"""

import email
import re
import tarfile
import zipfile

import pytest

from megatron_fssdp.config.shipped_files import shipped_folder

from .support.python_process import ROOT, python_output

VERSION_OF_NO_GIT = "0.1.dev0"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """An sdist, and the wheel without compiled kernels that is built from it outside of a git repository."""
    folder = tmp_path_factory.mktemp("dist")
    _build("build_sdist", folder, ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    _build("build_wheel", folder, folder / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def _build(hook, out, sources):
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    python_output("-c", code, cwd=sources, MEGATRON_FSSDP_PURE="1")


def test_the_wheel_has_every_module_type_information_and_licence(distributions):
    with zipfile.ZipFile(distributions[1]) as archive:
        names = set(archive.namelist())
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "megatron_fssdp").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".c", ".so")
    }
    assert {"megatron_fssdp/py.typed", "megatron_fssdp/report/page.css"} < files
    assert files <= names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    top = {name.partition("/")[0] for name in names}
    assert {folder for folder in top if not folder.endswith(".dist-info")} == {"megatron_fssdp"}


def test_the_wheel_has_all_shipped_configs_unchanged(distributions):
    with zipfile.ZipFile(distributions[1]) as archive:
        shipped = {
            name.removeprefix("megatron_fssdp/configs/"): archive.read(name)
            for name in archive.namelist()
            if name.startswith("megatron_fssdp/configs/") and not name.endswith("/")
        }
    folder = ROOT / "configs"
    assert shipped_folder() == folder
    assert shipped == {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_an_unpacked_wheel_finds_its_configs_from_any_folder(distributions, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(distributions[1]) as archive:
        archive.extractall(site)
    code = (
        "import megatron_fssdp.config.shipped_files as files;"
        "from megatron_fssdp.config.run.composition import load_run;"
        "from megatron_fssdp.config.cluster_description import load_cluster;"
        "assert files.__file__.startswith(SITE), files.__file__;"
        "assert str(files.shipped_folder()).startswith(SITE);"
        "load_cluster('hecate-a'); import sys;"
        "assert 'torch' not in sys.modules;"
        "load_run(['models/tiny-mixtral', 'parallelism/cpu', 'training/tiny'])"
    ).replace("SITE", repr(str(site)))
    python_output("-c", code, cwd=tmp_path, PYTHONPATH=str(site))


def test_version_metadata_and_files_of_the_sdist(distributions):
    sdist, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(path))
    required = {
        re.match(r"[\w-]+", line)[0] for line in metadata.get_all("Requires-Dist") if "extra" not in line
    }
    assert required == {"megatron-core", "numpy", "pydantic", "PyYAML", "torch"}
    version = metadata["Version"]
    assert sdist.name == f"megatron_fssdp-{version}.tar.gz"
    if (ROOT / ".git").exists():
        assert version != VERSION_OF_NO_GIT
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"megatron_fssdp", "configs", "docs", "patches", "scripts", "tests", "LICENSE"} <= top
    assert top.isdisjoint({".venv", "runs", ".git", "site"})
