"""Patches of Megatron-LM's scripts contain only our lines, apply completely or not at all, and revert."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIFFS = sorted((ROOT / "patches").glob("*.diff"))
MEGATRON_LM = os.environ.get("MEGATRON_LM_PATH")
SCRIPTS = ("pretrain_gpt.py", "examples/bert/pretrain_bert.py")
LINES = "    import megatron_fssdp\n    megatron_fssdp.register()"
BEHIND = "  # adds --moe-strategy, before arguments are parsed\n"
TOOLS = (
    "bash",
    "env",
    "basename",
    "cat",
    "cp",
    "dirname",
    "grep",
    "head",
    "mkdir",
    "mktemp",
    "mv",
    "readlink",
    "rm",
    "sed",
    "tail",
    "wc",
)
HUNK = re.compile(r"^@@ -(?P<after>\d+),0 \+(?P<first>\d+),(?P<count>\d+) @@$")


def field(diff: Path, name: str) -> str:
    found = re.search(rf"^{name}: (.+)$", diff.read_text(), re.MULTILINE)
    assert found is not None, f"{diff} has no line {name}:"
    return found[1]


def run(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "scripts" / "apply_patches.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def texts(checkout: Path) -> dict[str, str]:
    return {
        str(path.relative_to(checkout)): path.read_text()
        for path in sorted(checkout.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


def made_up_checkout(folder: Path, diff: Path) -> Path:
    """Build a script that a diff applies to, without any line of Megatron's."""
    places = [int(hunk["after"]) for line in diff.read_text().splitlines() if (hunk := HUNK.match(line))]
    for script, place in zip(SCRIPTS, places, strict=True):
        path = folder / script
        path.parent.mkdir(parents=True, exist_ok=True)
        above = [f"# line {number}" for number in range(1, place)]
        path.write_text("\n".join([*above, 'if __name__ == "__main__":', "    print('trained')", ""]))
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    major, minor = field(diff, "Version").split(".")
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 1\nVERSION = (MAJOR, MINOR, PATCH)\n")
    return folder


@pytest.fixture(params=DIFFS, ids=lambda path: path.stem)
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return made_up_checkout(tmp_path / "Megatron-LM", request.param)


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    return made_up_checkout(tmp_path / "Megatron-LM", ROOT / "patches" / "main.diff")


@pytest.mark.parametrize("diff", DIFFS, ids=lambda path: path.stem)
def test_the_diffs_contain_only_our_lines(diff: Path) -> None:
    lines = diff.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("diff --git"))
    for line in lines[start:]:
        is_header = line.startswith(("diff --git ", "--- a/", "+++ b/"))
        assert is_header or HUNK.match(line) or line.startswith("+"), line
    added = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert all(line == "" or "megatron_fssdp" in line for line in added)


def test_a_checkout_is_patched_once_and_reverted(checkout: Path) -> None:
    before = texts(checkout)
    check = run(checkout, "--check")
    assert check.returncode == 0, check.stderr
    assert check.stdout.count("can be patched") == 2
    assert texts(checkout) == before

    done = run(checkout)
    assert done.returncode == 0, done.stderr
    assert "added 3 lines" in done.stdout
    after = texts(checkout)
    assert after.keys() == before.keys()
    for script in SCRIPTS:
        above, _, below = after[script].partition(LINES)
        assert above.endswith('if __name__ == "__main__":\n')
        assert below.endswith("    print('trained')\n")
        compile(after[script], script, "exec")

    again = run(checkout)
    assert (again.returncode, again.stdout.count("is patched already")) == (0, 2)
    assert run(checkout, "--check").stdout.count("is patched") == 2
    assert texts(checkout) == after

    back = run(checkout, "--revert")
    assert back.returncode == 0, back.stderr
    assert "removed 3 lines" in back.stdout
    assert texts(checkout) == before
    assert run(checkout, "--revert").stdout.count("is not patched") == 2


def test_git_and_patch_do_the_same_without_a_repository(checkout: Path, tmp_path: Path) -> None:
    if shutil.which("git") is None or shutil.which("patch") is None:
        pytest.skip("needs git and patch")
    results = {}
    for tool in ("git", "patch"):
        folder = tmp_path / tool
        folder.mkdir()
        for name in [*TOOLS, tool]:
            (folder / name).symlink_to(shutil.which(name))  # type: ignore[arg-type]
        done = run(checkout, env={"PATH": str(folder)})
        assert done.returncode == 0, done.stderr
        results[tool] = texts(checkout)
        assert run(checkout, "--revert", env={"PATH": str(folder)}).returncode == 0
    assert results["git"] == results["patch"] != texts(checkout)


def test_a_checkout_inside_another_repository_is_patched(newest: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert run(newest).returncode == 0
    assert texts(newest)["pretrain_gpt.py"].count(LINES) == 1


def test_a_half_patched_checkout_is_completed(newest: Path) -> None:
    before = texts(newest)
    run(newest)
    after = texts(newest)
    (newest / SCRIPTS[1]).write_text(before[SCRIPTS[1]])
    done = run(newest)
    assert done.returncode == 0
    assert "pretrain_gpt.py: is patched already" in done.stdout
    assert texts(newest) == after


@pytest.mark.parametrize("mode", [[], ["--check"]])
@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (
            lambda bert: bert.write_text("# a line of a fork's\n" + bert.read_text()),
            "instead of «if __name__",
        ),
        (
            lambda bert: bert.write_text(bert.read_text() + "import megatron_fssdp\n"),
            "mentions megatron_fssdp",
        ),
        (lambda bert: bert.unlink(), "does not exist"),
    ],
)
def test_a_changed_script_is_refused_and_the_other_left_alone(newest, spoil, wanted, mode) -> None:
    spoil(newest / SCRIPTS[1])
    before = texts(newest)
    refused = run(newest, *mode)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert wanted in line
    assert texts(newest) == before


def test_moved_lines_of_a_patched_script_are_not_reverted(newest: Path) -> None:
    run(newest)
    bert = newest / SCRIPTS[1]
    bert.write_text("# a line of a fork's\n" + bert.read_text())
    before = texts(newest)
    refused = run(newest, "--revert")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert texts(newest) == before


def test_lines_added_below_a_patch_stay(newest: Path) -> None:
    run(newest)
    bert = newest / SCRIPTS[1]
    patched = bert.read_text()
    bert.write_text(patched + "    megatron_fssdp.start_session('ep')")  # and no newline at the end
    assert run(newest, "--check").returncode == 0
    done = run(newest, "--revert")
    assert done.returncode == 0, done.stderr
    assert bert.read_text() == patched.replace(LINES + BEHIND, "") + "    megatron_fssdp.start_session('ep')"


def test_a_file_that_cannot_be_written_changes_nothing(newest: Path) -> None:
    before = texts(newest)
    # This blocks the second file's copy, also for root.
    (newest / f"{SCRIPTS[1]}.megatron-fssdp-new").mkdir()
    refused = run(newest)
    assert refused.returncode == 2
    assert "cannot be written" in refused.stderr
    assert texts(newest) == before


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "no checkout was given"),
        (["/no/such/folder"], "is not a folder"),
        (["."], "has no megatron/core/package_info.py"),
        ([".", "--undo"], "unknown option --undo"),
        ([".", "--check", "--revert"], "exclude each other"),
        ([".", "."], "two checkouts"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, wanted, tmp_path) -> None:
    refused = run(*arguments, cwd=tmp_path)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert wanted in line


def test_an_unknown_release_is_refused(newest: Path) -> None:
    info = newest / "megatron" / "core" / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 15\nPATCH = 3\n")
    refused = run(newest)
    assert refused.returncode == 2
    assert "0.15.3, for which there is no patch; there is one for 0.18 (core_v0.18.x)" in refused.stderr


def git(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["git", "-C", str(MEGATRON_LM), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def exported(diff: Path, revision: str, folder: Path) -> Path:
    """The files of a revision that the patches and the detection of the release look at."""
    if git("cat-file", "-e", f"{revision}^{{commit}}").returncode:
        pytest.skip(f"MEGATRON_LM_PATH has no {revision}")
    for name in (*SCRIPTS, "megatron/core/package_info.py"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(git("show", f"{revision}:{name}").stdout)
    return folder


@pytest.mark.skipif(MEGATRON_LM is None, reason="needs a Megatron-LM checkout (MEGATRON_LM_PATH)")
@pytest.mark.parametrize(
    ("diff", "revision"),
    [(diff, revision) for diff in DIFFS for revision in field(diff, "Tried with").split()],
    ids=lambda value: value.stem if isinstance(value, Path) else value[:12],
)
def test_the_patches_apply_to_megatron(diff: Path, revision: str, tmp_path: Path) -> None:
    checkout = exported(diff, revision, tmp_path / "Megatron-LM")
    before = texts(checkout)
    done = run(checkout)
    assert done.returncode == 0, done.stderr
    assert f"patches/{diff.name}" in done.stdout
    after = texts(checkout)
    for script in SCRIPTS:
        # Only our lines are added, at the head of the main block, whatever follows.
        head = after[script].index('if __name__ == "__main__":\n' + LINES)
        tail = len(after[script]) - len(before[script])
        place = head + len('if __name__ == "__main__":\n')
        assert after[script][:place] + after[script][place + tail :] == before[script]
        compile(after[script], script, "exec")
    assert run(checkout, "--revert").returncode == 0
    assert texts(checkout) == before


@pytest.mark.slow
@pytest.mark.skipif(MEGATRON_LM is None, reason="needs a Megatron-LM checkout (MEGATRON_LM_PATH)")
@pytest.mark.parametrize("launcher", [[], ["-m", "megatron_fssdp"]], ids=["alone", "under the launcher"])
def test_a_patched_script_trains(launcher: list[str], tmp_path: Path) -> None:
    from tests.megatron_adapter.training_run import TINY_GPT_MOE

    copy = tmp_path / "Megatron-LM"
    shutil.copytree(str(MEGATRON_LM), copy, ignore=shutil.ignore_patterns(".git", "tests", "docs"))
    assert run(copy).returncode == 0

    def train(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *(*launcher, str(copy / "pretrain_gpt.py"), *TINY_GPT_MOE.split(), "--mock-data"),
                *("--train-iters", "3", "--log-interval", "1", "--expert-model-parallel-size", "2"),
                *arguments,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
        )

    done = train("--moe-strategy", "fssdp")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        3/" in done.stdout
    assert "[fssdp] strategy fssdp: installed in 2 MoE layers" in done.stdout + done.stderr
    refused = train("--moe-strategy", "fsdp")
    said = [line for line in refused.stderr.splitlines() if "[fssdp]" in line]
    assert len(said) == 1, refused.stderr[-3000:]
    assert "did you mean 'fssdp'" in said[0]
    assert "exitcode  : 2" in refused.stderr
