import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.python_process import ROOT

DIFFS = sorted((ROOT / "patches").glob("*.diff"))
MEGATRON_LM = os.environ.get("MEGATRON_LM_PATH")
SCRIPTS = ("pretrain_gpt.py", "examples/bert/pretrain_bert.py")
INFO = "megatron/core/package_info.py"
MAIN = 'if __name__ == "__main__":\n'
LINES = "    import megatron_fssdp\n    megatron_fssdp.register()"
HUNK = re.compile(r"^@@ -(?P<after>\d+),0 \+(?P<first>\d+),(?P<count>\d+) @@$")


def field(diff, name):
    match = re.search(rf"^{name}: (.+)$", diff.read_text(), re.MULTILINE)
    assert match is not None, f"{diff} has no line {name}:"
    return match[1]


def run(*arguments, **options):
    command = ["bash", str(ROOT / "scripts" / "apply_patches.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def texts(checkout):
    return {name: path.read_text() for name in (*SCRIPTS, INFO) if (path := checkout / name).exists()}


def made_up_checkout(folder, diff):
    """Build a script that a diff applies to, without any line of Megatron's."""
    places = [int(hunk["after"]) for line in diff.read_text().splitlines() if (hunk := HUNK.match(line))]
    for script, place in zip(SCRIPTS, places, strict=True):
        path = folder / script
        path.parent.mkdir(parents=True, exist_ok=True)
        above = "".join(f"# line {number}\n" for number in range(1, place))
        path.write_text(f"{above}{MAIN}    print('trained')\n")
    (folder / INFO).parent.mkdir(parents=True)
    major, minor = field(diff, "Version").split(".")
    (folder / INFO).write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 1\n")
    return folder


@pytest.fixture(params=DIFFS, ids=lambda path: path.stem)
def checkout(request, tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)  # a repository around it must not matter
    return made_up_checkout(tmp_path / "Megatron-LM", request.param)


@pytest.fixture
def newest(tmp_path):
    return made_up_checkout(tmp_path / "Megatron-LM", ROOT / "patches" / "main.diff")


@pytest.mark.parametrize("diff", DIFFS, ids=lambda path: path.stem)
def test_the_diffs_contain_only_our_lines(diff):
    lines = diff.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("diff --git"))
    for line in lines[start:]:
        is_header = line.startswith(("diff --git ", "--- a/", "+++ b/"))
        assert is_header or HUNK.match(line) or line == "+" or "megatron_fssdp" in line, line


def test_a_checkout_is_patched_once_and_reverted(checkout):
    before = texts(checkout)
    check = run(checkout, "--check")
    assert (check.returncode, check.stdout.count(": stock")) == (0, 2), check.stderr
    assert texts(checkout) == before
    done = run(checkout)
    assert done.returncode == 0, done.stderr
    after = texts(checkout)
    for script in SCRIPTS:
        above, _, below = after[script].partition(LINES)
        assert above.endswith(MAIN)
        assert below.endswith("    print('trained')\n")
        compile(after[script], script, "exec")
    assert run(checkout).stdout.count(": patched") == 2
    assert texts(checkout) == after
    (checkout / SCRIPTS[1]).write_text(before[SCRIPTS[1]])  # a half patched checkout is completed
    assert run(checkout).returncode == 0
    assert texts(checkout) == after
    for _ in range(2):
        assert run(checkout, "--revert").returncode == 0
        assert texts(checkout) == before


@pytest.mark.parametrize("mode", [[], ["--check"]])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda bert: bert.write_text("# a line of a fork's\n" + bert.read_text()),
        lambda bert: bert.write_text(bert.read_text() + "import megatron_fssdp\n"),
        lambda bert: bert.unlink(),
    ],
)
def test_a_changed_script_is_refused_and_the_other_left_alone(newest, spoil, mode):
    spoil(newest / SCRIPTS[1])
    before = texts(newest)
    refused = run(newest, *mode)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert f"{SCRIPTS[1]} is not the script of main" in line
    assert texts(newest) == before


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "has no megatron/core/package_info.py"),
        (["/no/such/folder"], "has no megatron/core/package_info.py"),
        ([".", "--undo"], "usage"),
        ([".", "--check", "--revert"], "usage"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, wanted, tmp_path):
    refused = run(*arguments, cwd=tmp_path)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert wanted in line


def test_an_unknown_release_is_refused(newest):
    (newest / INFO).write_text("MAJOR = 0\nMINOR = 15\nPATCH = 3\n")
    refused = run(newest)
    assert refused.returncode == 2
    assert "is Megatron-LM 0.15, wanted 0.19 0.20; use the launcher" in refused.stderr


def git(*arguments):
    command = ["git", "-C", str(MEGATRON_LM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(MEGATRON_LM is None, reason="needs a Megatron-LM checkout (MEGATRON_LM_PATH)")
@pytest.mark.parametrize(
    ("diff", "revision"),
    [(diff, revision) for diff in DIFFS for revision in field(diff, "Tried with").split()],
    ids=lambda value: value.stem if isinstance(value, Path) else value[:12],
)
def test_the_patches_apply_to_megatron(diff, revision, tmp_path):
    if git("cat-file", "-e", f"{revision}^{{commit}}").returncode:
        pytest.skip(f"MEGATRON_LM_PATH has no {revision}")
    for name in (*SCRIPTS, INFO):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(git("show", f"{revision}:{name}").stdout)
    before = texts(tmp_path)
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    after = texts(tmp_path)
    for script in SCRIPTS:
        # Only our lines are added, at the head of the main block, whatever follows.
        place = after[script].index(MAIN + LINES) + len(MAIN)
        tail = len(after[script]) - len(before[script])
        assert after[script][:place] + after[script][place + tail :] == before[script]
        compile(after[script], script, "exec")
    assert run(tmp_path, "--revert").returncode == 0
    assert texts(tmp_path) == before
