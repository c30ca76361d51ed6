import shutil
import subprocess

import pytest

from tests.support.python_process import ROOT

SCRIPTS = sorted([*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("scripts/**/*.sbatch"), ROOT / ".ci" / "run"])
CHECK = ("shellcheck", "--shell=bash", "--severity=style", "--external-sources", "--source-path=SCRIPTDIR")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_shell_script_has_no_problem(script):
    for words in (("bash", "-n"), CHECK):
        if shutil.which(words[0]):
            done = subprocess.run([*words, script], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
