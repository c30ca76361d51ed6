"""What a GPU machine without a network gets, and how the check takes it from there."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
OWN_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def test_the_bundle_has_all_packages_but_those_of_torch() -> None:
    words = [sys.executable, SCRIPTS / "bundled_packages.py"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    names = {line.partition("==")[0] for line in printed.splitlines()}
    assert {"megatron-core", "numpy", "pydantic", "plotly", "pytest", "iniconfig"} <= names
    assert not {"torch", "triton", "sympy", "megatron-fssdp"} & names


@pytest.mark.parametrize(
    ("tag", "python", "message"),
    [
        (OWN_TAG, sys.executable, "got no CUDA device"),
        ("cp39", sys.executable, f"got cp39, wanted wheels for {OWN_TAG}"),
        (OWN_TAG, "no-such-python", "got no torch"),
    ],
)
def test_the_check_unpacks_wheels_of_its_python(tag: str, python: str, message: str, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    (bundle / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(bundle / "wheels" / f"small-1.0-{tag}-{tag}-linux_x86_64.whl", "w") as wheel:
        wheel.writestr("small_module.py", "")
    words = [
        "bash",
        SCRIPTS / "gpu_check.sh",
        "--bundle",
        bundle,
        "--python",
        python,
        "--out",
        tmp_path / "out",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words += ["--out", tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert (bundle / "site-packages" / "small_module.py").exists() == (message == "got no CUDA device")
