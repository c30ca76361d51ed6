"""Every shell script parses, and shellcheck finds no problem where it is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    [*(ROOT / "scripts").rglob("*.sh"), *(ROOT / "scripts").rglob("*.sbatch"), ROOT / ".ci" / "run"]
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_parses_every_script(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_no_problem(script: Path) -> None:
    done = subprocess.run(
        [
            *("shellcheck", "--shell=bash", "--severity=style"),
            *("--external-sources", "--source-path=SCRIPTDIR", script),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
