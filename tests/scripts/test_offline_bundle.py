import os
import subprocess
import sys
import zipfile

import pytest

from scripts.unpack_bundle import lacking

from ..support.python_process import ROOT, python_output

SCRIPTS = ROOT / "scripts"
OWN_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def package(folder, name, version, needs=""):
    """Make an installed package of metadata alone, or a wheel if the folder is named so."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {needs}\n" if needs else ""
    inner = f"{name}-{version}.dist-info/METADATA"
    if folder.name == "wheels":
        path = folder / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(inner, metadata)
        return path
    (folder / inner).parent.mkdir(parents=True)
    (folder / inner).write_text(metadata)
    return folder / inner


def test_packages_of_the_machine_stay_unless_they_do_not_fit(tmp_path, monkeypatch):
    here, wheels = tmp_path / "here", tmp_path / "wheels"
    wheels.mkdir()
    package(here, "fits", "1.5")
    package(here, "too_old", "1.5")
    package(here, "unasked", "0.1")
    monkeypatch.syspath_prepend(str(here))
    package(wheels, "fits", "2.0")
    package(wheels, "unasked", "2.0")
    wanted = [
        package(wheels, "missing", "1.0", needs="too-old>=2"),
        package(wheels, "missing_too", "1.0", needs="fits>=1"),
        package(wheels, "too_old", "2.0", needs="unasked>=3; extra == 'more'"),
    ]
    assert lacking(wheels.iterdir()) == wanted


def test_the_bundle_has_all_packages_but_those_of_torch():
    printed = python_output(SCRIPTS / "bundled_packages.py").splitlines()
    names = {line.partition("==")[0] for line in printed}
    assert {"megatron-core", "numpy", "pydantic", "plotly", "pytest", "iniconfig"} <= names
    assert not {"torch", "triton", "sympy", "megatron-fssdp"} & names


@pytest.mark.parametrize(
    ("tag", "python", "message"),
    [
        (OWN_TAG, "{with_torch}", "got no CUDA device"),
        ("cp39", "{with_torch}", f"got cp39, wanted wheels for {OWN_TAG}"),
        (OWN_TAG, "no-such-python", "got no torch"),
    ],
)
def test_the_check_unpacks_wheels_of_its_python(tag, python, message, tmp_path):
    bundle = tmp_path / "bundle"
    (bundle / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(bundle / "wheels" / f"small-1.0-{tag}-{tag}-linux_x86_64.whl", "w") as wheel:
        wheel.writestr("small_module.py", "")
        wheel.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
    with_torch = tmp_path / "python"  # imports nothing that this test does not need
    with_torch.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exec {sys.executable} "$@"\n')
    with_torch.chmod(0o755)
    python = python.format(with_torch=with_torch)
    words = ["bash", SCRIPTS / "gpu_check.sh", "--bundle", bundle, "--python", python]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words += ["--out", tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert (bundle / "site-packages" / "small_module.py").exists() == (message == "got no CUDA device")
