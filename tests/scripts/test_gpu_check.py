"""The parts of `scripts/gpu_check.sh`, and (slow) the whole check on virtual devices."""

import dataclasses
import json
import re
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_fssdp.cli.gpu_check import __main__ as gpu_check
from megatron_fssdp.cli.gpu_check.check_outcome import CheckOutcome
from megatron_fssdp.cli.gpu_check.check_page import page_html, write_files
from megatron_fssdp.cli.gpu_check.check_plan import CheckPlan, Precision
from megatron_fssdp.cli.gpu_check.check_steps import check_steps, parity_trainings
from megatron_fssdp.cli.gpu_check.machine_facts import MachineFacts, shown_environment
from megatron_fssdp.cli.gpu_check.parity import CASES, TOLERANCES, compared, records_of
from megatron_fssdp.cli.gpu_check.step import Step, StepResult, StepVerdict
from megatron_fssdp.cli.gpu_check.step_runner import run_step
from megatron_fssdp.config.strategy.strategy_registry import SHIPPED, STRATEGIES
from megatron_fssdp.records.metrics import IterationMetrics
from megatron_fssdp.records.metrics_file import METRICS_FILE

ROOT = Path(__file__).parents[2]
FP32 = Precision.FP32
FACTS = MachineFacts("2026-11-22 12:00 UTC", {"torch": "2.15", "megatron-core": "0.19"}, ("NVIDIA H100",) * 8)


def step(name: str, code: str, limit_s: float = 60, **more: Any) -> Step:
    return Step(name, f"what {name} checks", (sys.executable, "-c", textwrap.dedent(code)), limit_s, **more)


def plan_in(folder: Path, *, is_virtual: bool = False) -> CheckPlan:
    plan = CheckPlan(ROOT, folder, 4, is_virtual=is_virtual)
    for each in (plan.logs, plan.results, plan.work):
        each.mkdir()
    return plan


def record(plan: CheckPlan, case: Any, losses: list[float], precision: Precision = FP32) -> None:
    folder = records_of(plan, case, precision)
    folder.mkdir(parents=True)
    entries = [IterationMetrics(number, loss, 1.0, 0.1, 10.0) for number, loss in enumerate(losses, 1)]
    (folder / METRICS_FILE).write_text(
        "".join(json.dumps(dataclasses.asdict(entry)) + "\n" for entry in entries)
    )


# Steps.


def test_a_failing_step_keeps_the_end_of_its_log(tmp_path: Path) -> None:
    result = run_step(step("bad", "print('the reason'); raise SystemExit(7)"), tmp_path)
    assert (result.verdict, result.exit_code, result.reason) == (StepVerdict.FAILED, 7, "exit code 7")
    assert "the reason" in result.log_end
    assert result.log is not None
    assert "the reason" in result.log.read_text()


def test_a_hanging_step_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    """The child has a session of its own, as torchrun's ranks have, and its parent is killed first."""
    code = """
        import subprocess, sys, time

        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleep, start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(600)
    """
    started_s = time.monotonic()
    result = run_step(step("hang", code, limit_s=1.5), tmp_path)
    assert time.monotonic() - started_s < 30
    assert result.verdict is StepVerdict.FAILED
    assert "still running after 2 s" in result.reason
    child = int((tmp_path / "hang.txt").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_findings_and_judgements_fail_a_step(tmp_path: Path) -> None:
    torchrun = step("ranks", "print('  exitcode  : 3 (pid: 9)'); raise SystemExit(1)")
    assert "virtual devices report findings" in run_step(torchrun, tmp_path).reason
    judged = run_step(step("judged", "", judge=lambda: "a loss differs"), tmp_path)
    assert (judged.verdict, judged.reason) == (StepVerdict.FAILED, "a loss differs")
    damaged = run_step(step("damaged", "", judge=lambda: {}["x"]), tmp_path)
    assert "cannot be read: KeyError" in damaged.reason
    unknown = run_step(Step("unknown", "", (str(tmp_path / "no-such-command"),), 9), tmp_path)
    assert "cannot be started" in unknown.reason


# Losses.


def test_losses_are_compared_with_those_of_none(tmp_path: Path) -> None:
    plan, (baseline, near, far, short, *_) = plan_in(tmp_path), CASES
    record(plan, baseline, [8.0, 4.0])
    record(plan, near, [8.0, 4.0 * (1 + TOLERANCES[FP32] / 2)])
    record(plan, far, [8.0, 4.0 * (1 + TOLERANCES[FP32] * 2)])
    record(plan, short, [8.0])
    assert compared(plan, baseline, FP32).problem == ""
    assert compared(plan, near, FP32).problem == ""
    row = compared(plan, far, FP32)
    assert row.first_difference == 0
    assert row.problem == "losses differ from those of none by 2.0e-04, wanted at most 1e-04"
    assert "no losses to compare with" in compared(plan, short, FP32).problem
    assert compared(plan, CASES[-1], FP32).problem == "no losses were recorded"
    record(plan, CASES[-1], [8.0, float("nan")])
    assert compared(plan, CASES[-1], FP32).problem == "a loss is not finite"


def test_every_strategy_is_trained_after_its_baseline(tmp_path: Path) -> None:
    shipped = {name for name, entry in STRATEGIES.items() if entry.package == SHIPPED}
    for is_virtual in (False, True):
        trainings = parity_trainings(CheckPlan(ROOT, tmp_path, 4, is_virtual=is_virtual))
        assert {case.strategy for case, precision in trainings if precision is FP32} == shipped
        for precision in Precision:
            cases = [case.strategy for case, each in trainings if each is precision]
            assert cases[0] == "none"
            assert len(cases) > 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 16])
def test_every_number_of_devices_makes_steps(num_ranks: int, tmp_path: Path) -> None:
    steps = check_steps(CheckPlan(ROOT, tmp_path, num_ranks))
    assert len({each.name for each in steps}) == len(steps)
    by_name = {each.name: each for each in steps}
    assert bool(by_name["overlap"].skipped) == (num_ranks == 1)
    for each in steps:
        if each.name.startswith("parity"):
            assert f"--nproc-per-node={num_ranks}" in each.command


# The page.


def outcome(plan: CheckPlan, **verdicts: StepVerdict) -> CheckOutcome:
    results = [
        StepResult(
            Step(name, "…", ("true",), 1),
            verdict,
            "<a reason>" if verdict is StepVerdict.FAILED else "",
            log_end="the <end> of the log",
        )
        for name, verdict in verdicts.items()
    ]
    return CheckOutcome(plan, FACTS, results, [compared(plan, CASES[0], FP32)])


def test_a_virtual_page_promises_no_speed(tmp_path: Path) -> None:
    plan = plan_in(tmp_path, is_virtual=True)
    counted = {"virtual": "no times", "host_synchronizations": {"ours": 1}}
    (plan.results / "gpu_layer.json").write_text(json.dumps({"sizes": {"toy": counted}}))
    (plan.results / "overlap.json").write_text(json.dumps({"summaries": [{"setting": "2 micro-batches"}]}))
    record(plan, CASES[0], [8.0, 4.0])
    report = {"findings": [], "known_findings": [{"reason": "A view."}], "counts": {"collective": 7}}
    (plan.findings / "doctor").mkdir(parents=True)
    (plan.findings / "doctor" / "rank0.json").write_text(json.dumps(report))
    html = page_html(outcome(plan, doctor=StepVerdict.PASSED))
    top = html[html.index("<header>") : html.index("</header>")]
    assert "PASSED: 1 steps, 1 passed" in top
    assert "4 virtual devices" in top
    assert "No GPU was used" in top
    assert "nothing about speed" in top
    assert html.count("<td>virtual devices: no times</td>") == 6
    assert "H100" not in top
    assert "Known finding in Megatron&#39;s own code: A view." in html
    assert "8.000000" in html


def test_a_page_names_devices_and_failures_first(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    made = outcome(plan, doctor=StepVerdict.PASSED, overlap=StepVerdict.FAILED)
    html = page_html(made)
    top = html[html.index("<header>") : html.index("</header>")]
    assert "FAILED: 2 steps, 1 passed, 1 failed" in top
    assert "8 × NVIDIA H100" in top
    assert "No GPU was used" not in html
    assert html.index("&lt;a reason&gt;") < html.index('id="steps"')
    assert "the &lt;end&gt; of the log" in html
    assert "The step gpu-layer has no results" in html
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", html), "the page needs no network"
    assert json.loads(made.summary_json())["verdict"] == "failed"


def test_a_damaged_result_costs_only_the_page(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    (plan.results / "gpu_layer.json").write_text(json.dumps({"sizes": {"coarse": {"no": "numbers"}}}))
    archive = write_files(outcome(plan, doctor=StepVerdict.PASSED))
    assert "This page could not be made" in (tmp_path / "gpu_check.html").read_text()
    with zipfile.ZipFile(archive) as found:
        assert {"gpu_check.json", "results/gpu_layer.json"} <= set(found.namelist())


def test_only_chosen_variables_are_collected() -> None:
    given = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "HOME": "/x", "AWS_SECRET_ACCESS_KEY": "x"}
    given |= {"TORCH_HUB_TOKEN": "x", "MEGATRON_FSSDP_DEVICE": "cuda"}
    assert list(shown_environment(given)) == ["CUDA_VISIBLE_DEVICES", "MEGATRON_FSSDP_DEVICE", "NCCL_DEBUG"]


# The command.


def check(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str, facts: MachineFacts = FACTS) -> int:
    def gather(folder: Path) -> MachineFacts:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "logs" / "machine.txt").touch()
        return facts

    monkeypatch.setattr(gpu_check, "_facts", gather)
    monkeypatch.setattr(sys, "argv", ["gpu_check.sh", "--root", str(ROOT), "--out", str(out), *words])
    return gpu_check.main()


def test_a_failing_step_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code = f"import pathlib; pathlib.Path({str(out / 'results' / 'last.json')!r}).write_text('[]')"
    steps = [step("first", "raise SystemExit(1)"), step("last", code), step("not", "", skipped="no tests")]
    monkeypatch.setattr(gpu_check, "check_steps", lambda plan: steps)
    monkeypatch.setattr(gpu_check, "parity_trainings", lambda plan: [])
    assert check(monkeypatch, out) == 1
    printed = capsys.readouterr().out
    assert "[ 1/3] first: what first checks" in printed
    assert "FAILED after" in printed
    assert "passed in" in printed
    assert "skipped: no tests" in printed
    with zipfile.ZipFile(out / "gpu_check.zip") as archive:
        names = set(archive.namelist())
    assert {"gpu_check.html", "gpu_check.json", "logs/first.txt", "results/last.json"} <= names
    assert (out / "gpu_check.html").exists()
    steps[:] = steps[1:]
    assert check(monkeypatch, out) == 0, "the folder of an earlier check is used again"
    assert not (out / "logs" / "first.txt").exists()


def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    without = dataclasses.replace(FACTS, devices=())
    assert check(monkeypatch, tmp_path / "a", facts=without) == 2
    assert "got no CUDA device that torch can use" in capsys.readouterr().err
    (tmp_path / "mine.txt").touch()
    assert check(monkeypatch, tmp_path) == 2
    assert "has other files" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_check_passes_on_virtual_devices(tmp_path: Path) -> None:
    words = ["bash", ROOT / "scripts" / "gpu_check.sh", "--virtual", "--python", sys.executable]
    done = subprocess.run(
        [*words, "--out", tmp_path / "out"], capture_output=True, text=True, cwd=ROOT, timeout=3500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    verdicts = {each["name"]: each["verdict"] for each in found["steps"]}
    assert set(verdicts.values()) <= {"passed", "skipped"}
    assert verdicts["gpu-layer"] == verdicts["overlap"] == "passed"
    moved = {row["case"] for row in found["parity"] if row["num_replicas"] or row["num_resharded"]}
    assert {"fssdp-rematerialized", "fastermoe-smart-schedule", "quota"} <= moved
    html = (tmp_path / "out" / "gpu_check.html").read_text()
    assert "No GPU was used" in html
