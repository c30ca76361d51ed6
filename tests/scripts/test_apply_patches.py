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
TOOLS = ("bash", "env", "basename", "dirname", "grep", "head", "paste", "sed", "tr", "xargs")
HUNK = re.compile(r"^@@ -(?P<after>\d+),0 \+\d+,\d+ @@$")


def field(diff: Path, name: str) -> str:
    found = re.search(rf"^{name}: (.+)$", diff.read_text(), re.MULTILINE)
    assert found is not None, f"{diff} has no line {name}:"
    return found[1]


def run(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "scripts" / "apply_patches.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def texts(checkout: Path) -> dict[str, str]:
    files = (path for path in sorted(checkout.rglob("*")) if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(checkout)): path.read_text() for path in files}


@pytest.fixture(params=DIFFS, ids=lambda path: path.stem)
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Scripts that a diff applies to, without any line of Megatron's."""
    folder, diff = tmp_path / "Megatron-LM", request.param
    places = [int(hunk["after"]) for line in diff.read_text().splitlines() if (hunk := HUNK.match(line))]
    for script, place in zip(SCRIPTS, places, strict=True):
        path = folder / script
        path.parent.mkdir(parents=True, exist_ok=True)
        above = [f"# line {number}" for number in range(1, place)]
        path.write_text("\n".join([*above, 'if __name__ == "__main__":', "    print('trained')", ""]))
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    major, minor = field(diff, "Version").split(".")
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 1\n")
    return folder


@pytest.mark.parametrize("diff", DIFFS, ids=lambda path: path.stem)
def test_the_diffs_contain_only_our_lines(diff: Path) -> None:
    lines = diff.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("diff --git"))
    for line in lines[start:]:
        is_header = line.startswith(("diff --git ", "--- a/", "+++ b/"))
        assert is_header or HUNK.match(line) or line.startswith("+"), line
    added = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert all(line == "" or "megatron_fssdp" in line for line in added)


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_a_checkout_is_patched_once_and_reverted(checkout: Path, tmp_path: Path, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name in (*TOOLS, tool):
        (bin_folder / name).symlink_to(shutil.which(name))  # type: ignore[arg-type]
    environment = {"PATH": str(bin_folder)}
    subprocess.run(["git", "init", "-q", tmp_path], check=True)  # a repository around it does not matter
    before = texts(checkout)
    for words, said, patched in (
        (["--check"], "can be patched", False),
        (["--revert"], "is not patched", False),
        ([], "is patched", True),
        ([], "is patched already", True),
        (["--check"], "is patched already", True),
        (["--revert"], "are removed", False),
    ):
        done = run(checkout, *words, env=environment)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert (texts(checkout) != before) == patched
        for script in SCRIPTS if patched else ():
            above, _, below = texts(checkout)[script].partition(LINES)
            assert above.endswith('if __name__ == "__main__":\n')
            assert below.endswith("    print('trained')\n")


@pytest.mark.parametrize("mode", [[], ["--check"]])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda bert: bert.write_text("# a line of a fork's\n" + bert.read_text()),
        lambda bert: bert.write_text(bert.read_text() + "import megatron_fssdp\n"),
        lambda bert: bert.unlink(),
    ],
)
def test_a_changed_script_is_refused_and_the_other_left_alone(checkout, spoil, mode) -> None:
    spoil(checkout / SCRIPTS[1])
    before = texts(checkout)
    refused = run(checkout, *mode)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert SCRIPTS[1] in line
    assert texts(checkout) == before


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "usage"),
        (["/no/such/folder"], "wanted a checkout of Megatron-LM"),
        ([".", "--undo"], "usage"),
        ([".", "--check", "--revert"], "usage"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, wanted, tmp_path) -> None:
    refused = run(*arguments, cwd=tmp_path)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert wanted in line


def test_an_unknown_release_is_refused(checkout: Path) -> None:
    (checkout / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 15\nPATCH = 3\n")
    refused = run(checkout)
    assert refused.returncode == 2
    assert "is Megatron-LM 0.15, wanted one of 0.18" in refused.stderr


@pytest.mark.skipif(MEGATRON_LM is None, reason="needs a Megatron-LM checkout (MEGATRON_LM_PATH)")
@pytest.mark.parametrize(
    ("diff", "revision"),
    [(diff, revision) for diff in DIFFS for revision in field(diff, "Tried with").split()],
    ids=lambda value: value.stem if isinstance(value, Path) else value[:12],
)
def test_the_patches_apply_to_megatron(diff: Path, revision: str, tmp_path: Path) -> None:
    git = ("git", "-C", str(MEGATRON_LM))
    if subprocess.run([*git, "cat-file", "-e", f"{revision}^{{commit}}"], capture_output=True).returncode:
        pytest.skip(f"MEGATRON_LM_PATH has no {revision}")
    checkout = tmp_path / "Megatron-LM"
    for name in (*SCRIPTS, "megatron/core/package_info.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shown = subprocess.run([*git, "show", f"{revision}:{name}"], capture_output=True, check=True)
        (checkout / name).write_bytes(shown.stdout)
    before = texts(checkout)
    done = run(checkout)
    assert done.returncode == 0, done.stderr
    assert diff.name in done.stdout
    for script in SCRIPTS:
        assert 'if __name__ == "__main__":\n' + LINES in texts(checkout)[script]
        compile(texts(checkout)[script], script, "exec")
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
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(*launcher, str(copy / "pretrain_gpt.py"), *TINY_GPT_MOE.split(), "--mock-data"),
            *("--train-iters", "3", "--log-interval", "1", "--expert-model-parallel-size", "2"),
            *("--moe-strategy", "fssdp"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        3/" in done.stdout
    assert "[fssdp] strategy fssdp: installed in 2 MoE layers" in done.stdout + done.stderr
