import json
import re
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_parity
from megatron_fssdp.config.strategy.strategy_registry import SHIPPED, STRATEGIES
from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check.page import page_html
from scripts.gpu_check.step import Step
from tests.support.python_process import ROOT, is_running


def step(name, code, limit_s=60, **more):
    return Step(name, (sys.executable, "-c", textwrap.dedent(code)), limit_s, **more)


def run(planned, logs):
    running = planned.start(logs)
    while (done := running.ended()) is None:
        time.sleep(0.05)
    return done


def test_a_failing_step_says_why(tmp_path):
    failed = run(step("bad", "print('the reason'); raise SystemExit(7)"), tmp_path)
    assert (failed.verdict, failed.reason) == ("failed", "exit code 7; its last line: the reason")
    torchrun = run(step("ranks", "print('  exitcode  : 3 (pid: 9)'); raise SystemExit(1)"), tmp_path)
    assert "virtual devices report findings" in torchrun.reason
    unknown = run(Step("unknown", (str(tmp_path / "no-such-command"),), 9), tmp_path)
    assert "cannot be started" in unknown.reason


def test_a_hanging_step_is_ended_with_all_its_processes(tmp_path):
    """The child has a session of its own, as torchrun's ranks have, and its parent is killed first."""
    code = """
        import subprocess, sys, time

        sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
        child = subprocess.Popen(sleep, start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(3600)
    """
    for limit_s in (2, 20, 200):  # in which the child starts, also on a busy machine
        hung = run(step("hang", code, limit_s), tmp_path)
        if said := (tmp_path / "hang.txt").read_text():
            break
    assert f"still running after {limit_s} s" in hung.reason
    child = int(said)
    assert not is_running(child)


def record(folder, losses):
    folder.mkdir()
    entry = {"rank_peak_bytes": [1 << 30], "layers": [{"num_replicas": 3}], "resharded_experts": 1}
    lines = [json.dumps({"lm_loss": loss, **entry}) + "\n" for loss in losses]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize(
    ("losses", "problem"),
    [
        ([8.0, 4.0], ""),
        ([8.0, 4.0 * (1 + 5e-5)], ""),
        ([8.0, 4.0 * (1 + 2e-4)], "losses differ from those of none by 2.0e-04, wanted at most 1e-04"),
        ([8.0], "the baseline none has no losses to compare with"),
        ([8.0, float("nan")], "a loss is not finite"),
        ([], "no losses were recorded"),
    ],
)
def test_losses_are_compared_with_those_of_none(losses, problem, tmp_path):
    baseline = record(tmp_path / "none", [8.0, 4.0])
    row = gpu_parity.compared("ep", "fp32", record(tmp_path / "ep", losses), baseline)
    assert row["problem"] == problem
    if losses:
        assert (row["num_replicas"], row["num_resharded"], row["peak_gib"]) == (3, len(losses), 1.0)


def test_every_strategy_is_trained_after_its_baseline():
    shipped = {name for name, entry in STRATEGIES.items() if entry.package == SHIPPED}
    assert {strategy for strategy, _ in gpu_parity.CASES.values()} == shipped
    assert next(iter(gpu_parity.CASES)) == "none"


@pytest.mark.parametrize("device", ["cuda", "one-card", "virtual"])
def test_benchmarks_know_the_options_that_they_get(device, tmp_path):
    steps = gpu_check.check_steps(ROOT, tmp_path, 4, device)
    of_benchmarks = [step.command for step in steps if step.command[1].startswith(str(ROOT / "benchmarks"))]
    names = {"gpu_parity", "gpu_kernels", "gpu_layer", "overlap"}
    assert {Path(words[1]).stem for words in of_benchmarks} == names
    for words in of_benchmarks:
        script = Path(words[1]).read_text(encoding="utf-8")
        options = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in script] == []


def test_the_page_has_verdict_losses_times_and_memory(tmp_path):
    row = {"case": "fssdp", "precision": "bf16", "losses": [8.0, 4.5], "difference": 2e-7, "problem": ""}
    row |= {"num_replicas": 3, "num_resharded": 0, "peak_gib": 1.5}
    row |= {"predicted": "…, replicas at most 1.4 <GiB> (…)"}
    fssdp = {"busiest_s": [1e-3, 2e-3, 3e-3], "none_over_this": [1.0, 1.25, 1.5]}
    fssdp |= {"replicas": 2.5, "kernels": 77, "peak_bytes_above_weights": 3 << 29}
    kernels = [["remap", "T 4", "even", 12.4, 60.6, None], ["attention", "long", "alone", 901.0, None, 80.0]]
    layer = {"sizes": {"coarse": {"layer": {"fssdp": fssdp}}}}
    rows = [row, {**row, "case": "none", "peak_gib": 1.0}]
    kept = {"gpu_layer": layer, "overlap": {"damaged": []}, "gpu_kernels": {"rows": kernels}}
    for name in ("logs", "results"):
        (tmp_path / name).mkdir()
    for name, result in kept.items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(result))
    (tmp_path / "results" / "parity.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = "```\nok      GPUs: 8 × NVIDIA <H100>\n```\n<details>"
    (tmp_path / "logs" / "doctor.txt").write_text(said + 9999 * "…")
    steps = [Step("doctor", ("true",), 1), Step("overlap", ("true",), 1).failed("<a reason>")]
    html = page_html(tmp_path, "FAILED: 2 steps", steps, 8, "cuda")
    for part in (
        *("FAILED: 2 steps", "8 GPUs", "8 × NVIDIA &lt;H100&gt;", "&lt;a reason&gt;", "4.500000", "2.0e-07"),
        *("1.50 GiB", "512 MiB", "1.4 &lt;GiB&gt;", "2.00 (1.00 to 3.00)", "1.25", "<td>77</td>"),
        *("even: 12 / 61", "alone: 901 (80 GB/s)"),
    ):
        assert part in html
    assert "No GPU was used" not in html
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", html), "the page needs no network"
    assert "shared one GPU" in page_html(tmp_path, "PASSED", steps[:1], 4, "one-card")
    assert "nothing about speed" in page_html(tmp_path, "PASSED", steps[:1], 4, "virtual")


def check(monkeypatch, out, *words, gpus=2):
    monkeypatch.setattr(gpu_check, "num_gpus", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["gpu_check.sh", "--root", str(ROOT), "--out", str(out), *words])
    return gpu_check.main()


@pytest.mark.parametrize(("gpus", "device", "ranks"), [(1, "one-card", 4), (2, "cuda", 2), (8, "cuda", 8)])
def test_ranks_share_a_single_card(gpus, device, ranks, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(gpu_check, "check", lambda out, steps, *rest: seen.append(rest) or 0)
    assert check(monkeypatch, tmp_path, gpus=gpus) == 0
    assert seen == [(ranks, device)]


def test_a_failing_step_does_not_stop_the_others(monkeypatch, capsys, tmp_path):
    out = tmp_path / "out"
    code = f"import pathlib; pathlib.Path({str(out / 'results' / 'last.json')!r}).write_text('[]')"
    steps = [step("doctor", ""), step("first", "raise SystemExit(1)"), step("last", code)]
    steps.append(step("not", "", verdict="skipped", reason="no tests"))
    monkeypatch.setattr(gpu_check, "check_steps", lambda *_, **__: list(steps))
    assert check(monkeypatch, out) == 1
    printed = capsys.readouterr().out
    for part in ("[ 2/4] first", "failed in", "passed in", "skipped in 0 s: no tests", "2 passed, 1 failed"):
        assert part in printed
    with zipfile.ZipFile(out / "gpu_check.zip") as archive:
        names = set(archive.namelist())
    assert {"gpu_check.html", "gpu_check.json", "logs/first.txt", "results/last.json"} <= names
    del steps[1]
    assert check(monkeypatch, out) == 0, "the folder of an earlier check is used again"


def test_trainings_run_side_by_side_but_for_their_baseline(monkeypatch, capsys, tmp_path):
    """The two steps in the middle end only if both run at once. The others run alone."""
    code = """
        import pathlib, sys, time

        pathlib.Path(sys.argv[1]).touch()
        while not pathlib.Path(sys.argv[2]).exists():
            time.sleep(0.05)
    """
    pair = [str(tmp_path / "one"), str(tmp_path / "other")]
    words = [(sys.executable, "-c", textwrap.dedent(code), *files) for files in (pair, pair[::-1])]
    both = [Step(f"beside{at}", command, 60, has_company=True) for at, command in enumerate(words)]
    steps = [step("doctor", ""), *both, step("end", "")]
    monkeypatch.setattr(gpu_check, "check_steps", lambda *_, **__: steps)
    monkeypatch.setattr(gpu_check.os, "cpu_count", lambda: 8)
    assert check(monkeypatch, tmp_path / "out", gpus=2) == 0
    said = [line.strip().split(" in ")[0] for line in capsys.readouterr().out.splitlines()]
    assert said[:2] == ["[ 1/4] doctor", "doctor: passed"]
    assert said[2:4] == ["[ 2/4] beside0", "[ 3/4] beside1"]
    assert said[6:8] == ["[ 4/4] end", "end: passed"]


def test_bad_input_is_one_line(monkeypatch, capsys, tmp_path):
    assert check(monkeypatch, tmp_path / "a", gpus=0) == 2
    assert "got no CUDA device that torch can use" in capsys.readouterr().err
    (tmp_path / "mine.txt").touch()
    assert check(monkeypatch, tmp_path) == 2
    assert "has other files" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").exists()


def test_single_steps_run_without_the_others(monkeypatch, capsys, tmp_path):
    steps = [step("doctor", "raise SystemExit(1)"), step("first", ""), step("last", "")]
    monkeypatch.setattr(gpu_check, "check_steps", lambda *_, **__: list(steps))
    for _ in range(2):  # The folder of an earlier check is used again.
        assert check(monkeypatch, tmp_path / "out", "--step=first", "--step=last") == 0
    assert "2 steps, 2 passed" in capsys.readouterr().out
    assert check(monkeypatch, tmp_path / "out", "--step=frist") == 2
    assert "--step frist: is no step" in capsys.readouterr().err


def test_refused_trainings_must_be_refused(monkeypatch, tmp_path):
    said = {"output": "", "code": 1}
    done = lambda command, **_: subprocess.CompletedProcess(command, said["code"], said["output"])  # noqa: E731
    monkeypatch.setattr(gpu_parity.subprocess, "run", done)
    words = ["--case", "refused-graphs", "--precision", "bf16", "--work", str(tmp_path)]
    assert gpu_parity.main(words) == 1
    said["output"] = "--cuda-graph-modules moe_preprocess with plans after the gate"
    assert gpu_parity.main(words) == 0
    said["code"] = 0
    assert gpu_parity.main(words) == 1
    assert set(gpu_parity.REFUSED) < set(gpu_parity.ARGUMENTS) < set(gpu_parity.CASES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_check_passes_on_virtual_devices(tmp_path):
    words = ["bash", ROOT / "scripts" / "gpu_check.sh", "--virtual", "--python", sys.executable]
    words += ["--out", tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    verdicts = {step["name"]: step["verdict"] for step in record["steps"]}
    assert set(verdicts.values()) <= {"passed", "skipped"}
    assert verdicts["overlap"] == "passed"
    moved = {row["case"] for row in record["parity"] if row["num_replicas"] or row["num_resharded"]}
    assert {"fssdp-rematerialized", "fastermoe-smart-schedule", "quota"} <= moved
    assert "fssdp-resharded" in {row["case"] for row in record["parity"] if row["num_resharded"]}
