"""Entry point of ``python -m megatron_fssdp.cli.gpu_check``, which ``scripts/gpu_check.sh`` starts."""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from megatron_fssdp.cli.gpu_check.check_outcome import CheckOutcome
from megatron_fssdp.cli.gpu_check.check_page import PAGE, write_files
from megatron_fssdp.cli.gpu_check.check_plan import VIRTUAL_RANKS, CheckPlan
from megatron_fssdp.cli.gpu_check.check_steps import check_steps, parity_trainings
from megatron_fssdp.cli.gpu_check.machine_facts import MachineFacts
from megatron_fssdp.cli.gpu_check.parity import compared
from megatron_fssdp.cli.gpu_check.step import Step, StepResult, StepVerdict
from megatron_fssdp.cli.gpu_check.step_runner import run_step
from megatron_fssdp.config.errors import ConfigurationError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main() -> int:
    """Run the check.

    Returns:
        The exit code: 0 if no step failed, 1 if one failed, 2 for invalid input.
    """
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="Check this node: doctor, GPU tests, losses of all strategies on all GPUs, benchmarks "
        "with traces. Writes one page and one zip.",
    )
    parser.add_argument("--virtual", action="store_true", help="use CPU processes that pose as CUDA devices")
    parser.add_argument("--python", help="interpreter to use instead of .venv; the script reads this option")
    parser.add_argument("--out", type=Path, help="output folder (default: runs/gpu_check)")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = (options.out or options.root / "runs" / "gpu_check").resolve()
    try:
        _empty(out)
        facts = _facts(out)
        if not facts.devices and not options.virtual:
            raise ConfigurationError(
                "devices: got no CUDA device that torch can use, wanted a node with GPUs; run megatron-fssdp "
                "doctor there, or give --virtual to try the check itself without a GPU"
            )
        plan = CheckPlan(
            root=options.root.resolve(),
            out=out,
            num_ranks=VIRTUAL_RANKS if options.virtual else len(facts.devices),
            is_virtual=options.virtual,
            has_engine=facts.has_engine,
        )
        return _check(plan, facts)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return EXIT_INTERRUPTED


def _check(plan: CheckPlan, facts: MachineFacts) -> int:
    for folder in (plan.logs, plan.results, plan.work):
        folder.mkdir(parents=True, exist_ok=True)
    steps = check_steps(plan)
    results: list[StepResult] = []
    for number, step in enumerate(steps, 1):
        print(f"[{number:2}/{len(steps)}] {step.name}: {step.title}", flush=True)
        results.append(run_step(step, plan.logs))
        print(f"        {_described(results[-1])}", flush=True)
    parity = [compared(plan, case, precision) for case, precision in parity_trainings(plan)]
    outcome = CheckOutcome(plan, facts, results, parity)
    archive = write_files(outcome)
    print(f"{outcome.verdict}\npage:   {plan.out / PAGE}\nattach: {archive}", flush=True)
    return 0 if outcome.passed else EXIT_FAILED


def _described(result: StepResult) -> str:
    if result.verdict is StepVerdict.PASSED:
        return f"passed in {result.seconds:.0f} s"
    if result.verdict is StepVerdict.SKIPPED:
        return f"skipped: {result.reason}"
    return f"FAILED after {result.seconds:.0f} s: {result.reason}; log: {result.log}"


def _facts(out: Path) -> MachineFacts:
    """Gather facts in a process of its own, so that a broken driver cannot hang the check.

    Raises:
        ConfigurationError: The facts cannot be gathered.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "facts.json"
        command = (sys.executable, "-m", "megatron_fssdp.cli.gpu_check.machine_facts", str(path))
        result = run_step(Step("machine", "facts about the machine", command, limit_s=120), out / "logs")
        if result.verdict is not StepVerdict.PASSED:
            raise ConfigurationError(
                f"the machine's devices: {result.reason}, wanted a torch that can be imported; read the log "
                f"{result.log}"
            )
        return MachineFacts.from_json(path.read_text(encoding="utf-8"))


def _empty(out: Path) -> None:
    """Remove the files of an earlier check. Other files are never deleted.

    Raises:
        ConfigurationError: The folder has files that are not from a check.
    """
    if out.is_dir() and any(out.iterdir()):
        if not (out / "logs" / "machine.txt").exists():
            raise ConfigurationError(
                f"--out {out}: has other files, wanted an empty folder or one of an earlier check; give "
                "another one"
            )
        for name in ("logs", "results", "work"):
            shutil.rmtree(out / name, ignore_errors=True)
    elif out.exists() and not out.is_dir():
        raise ConfigurationError(f"--out {out}: is a file, wanted a folder; give another")
    if not os.access(_existing(out), os.W_OK):
        raise ConfigurationError(f"--out {out}: cannot be written; give another folder")


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


if __name__ == "__main__":
    sys.exit(main())
