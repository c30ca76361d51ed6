"""Entry point of ``python -m scripts.gpu_check``, which ``scripts/gpu_check.sh`` starts."""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_parity import ARGUMENTS, BASELINE, CASES
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files.written_files import refuse_non_folder
from scripts.gpu_check.page import PAGE, write_results
from scripts.gpu_check.step import Running, Step

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130

_FEWEST_RANKS = 4  # of virtual devices, or on one card: the smallest number that has two nodes of two devices
_MOST_AT_ONCE = 4  # trainings beside each other, on a node with enough cores
_POLL_S = 0.1
_REPORT_VARIABLE = "MEGATRON_FSSDP_VIRTUAL_CUDA_REPORT"


def main() -> int:
    """Run the check.

    Returns:
        The exit code: 0 if no step failed, 1 if one failed, 2 for invalid input.
    """
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="Check this node: doctor, GPU tests, losses of all strategies on all GPUs, "
        "benchmarks. Writes one page and one zip.",
    )
    parser.add_argument("--virtual", action="store_true", help="use CPU processes that pose as CUDA devices")
    parser.add_argument("--python", help="interpreter to use instead of .venv; the script reads this option")
    parser.add_argument("--step", action="append", help="run only this step, such as gpu_kernels; repeatable")
    parser.add_argument("--out", type=Path, help="output folder (default: runs/gpu_check)")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    root = options.root.resolve()
    out = (options.out or root / "runs" / "gpu_check").resolve()
    try:
        refuse_non_folder(out, "--out")
        cards = 0 if options.virtual else num_gpus()
        if not cards and not options.virtual:
            raise ConfigurationError(
                "devices: got no CUDA device that torch can use, wanted a node with GPUs; run megatron-fssdp "
                "doctor there, or give --virtual to try the check itself without a GPU"
            )
        device = "virtual" if options.virtual else "one-card" if cards == 1 else "cuda"
        ranks = cards if cards > 1 else _FEWEST_RANKS
        steps = check_steps(root, out, ranks, device)
        wanted = options.step or [step.name for step in steps]
        if missing := set(wanted).difference(step.name for step in steps):
            raise ConfigurationError(f"--step {min(missing)}: is no step, wanted one such as gpu_kernels")
        steps = [step for step in steps if step.name in wanted]
        empty(out)
        return check(out, steps, ranks, device)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(f"interrupted; all processes have ended; {out / PAGE} has the steps before", file=sys.stderr)
        return EXIT_INTERRUPTED


def check(out: Path, steps: list[Step], ranks: int, device: str) -> int:
    """Run the steps, and write the page after each, so that a check that is stopped leaves a useful page.

    The device is ``cuda``, ``one-card`` (several ranks share it) or ``virtual``.
    """
    for name in ("logs", "results", "work"):
        (out / name).mkdir(parents=True, exist_ok=True)
    most = max(1, min(_MOST_AT_ONCE, (os.cpu_count() or 1) // ranks))
    running: dict[int, Running] = {}
    waiting = deque(range(len(steps)))
    try:
        while waiting or running:
            while waiting and _may_start(steps[waiting[0]], [steps[at] for at in running], most):
                at = waiting.popleft()
                print(f"[{at + 1:2}/{len(steps)}] {steps[at].name}", flush=True)
                running[at] = steps[at].start(out / "logs")
            for at, step in [(at, step) for at, run in running.items() if (step := run.ended()) is not None]:
                del running[at]
                steps[at] = step
                why = f": {step.reason}; log: {out / 'logs' / step.name}.txt" if step.reason else ""
                print(f"        {step.name}: {step.verdict} in {step.seconds:.0f} s{why}", flush=True)
                verdict, archive = write_results(out, steps, ranks, device)
            time.sleep(_POLL_S)
    finally:
        for run in running.values():
            run.end()
    print(f"{verdict}\npage:   {out / PAGE}\nattach: {archive}", flush=True)
    return EXIT_FAILED if any(step.verdict == "failed" for step in steps) else 0


def _may_start(step: Step, running: Sequence[Step], most: int) -> bool:
    """Whether a step may start beside those that run; their number is limited."""
    return not running or (len(running) < most and all(member.has_company for member in (step, *running)))


def check_steps(root: Path, out: Path, ranks: int, device: str) -> list[Step]:
    """Return all steps: doctor, tests and benchmarks of the checkout, those that teach most first."""
    python, results, is_virtual = sys.executable, out / "results", device == "virtual"

    def step(name: str, limit_s: float, *words: object, skipped: str = "", has_company: bool = False) -> Step:
        environment = {"MEGATRON_FSSDP_DEVICE": "cuda"}
        if is_virtual:  # the ranks share the cores
            environment |= {"OMP_NUM_THREADS": "1", _REPORT_VARIABLE: str(results / "virtual" / name)}
        verdict = "skipped" if skipped else "not run"
        command = (python, *map(str, words))
        return Step(name, command, limit_s, environment, has_company, verdict, skipped)

    def benchmark(name: str, limit_s: float, *words: object, skipped: str = "") -> Step:
        script, result = root / "benchmarks" / f"{name}.py", results / f"{name}.json"
        return step(name, limit_s, script, "--out", result, *words, skipped=skipped)

    tests, parity = root / "tests", root / "benchmarks" / "gpu_parity.py"
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu and not slow", f"--rootdir={root}")
    on_virtual = ("--virtual-gpu",) if is_virtual else ()
    words = (*pytest, "-c", root / "pyproject.toml", tests / "runtime", *on_virtual)
    gpu_tests = step("gpu_tests", 1200, *words)
    has_engine = importlib.util.find_spec("transformer_engine") is not None and not is_virtual
    of_engine = ("fssdp-grouped-tensor", "fssdp-graphs")
    plain = [case for case in CASES if case not in ARGUMENTS]
    # Virtual devices train in bf16 only where other code runs than in fp32.
    differing = (*ARGUMENTS, BASELINE, "fssdp-rematerialized")
    in_bf16 = [case for case in CASES if not is_virtual or case in differing]
    beside = device != "cuda"  # NCCL waits on the GPU: several trainings would hold up each other.
    trainings = {
        precision: [
            step(
                *(f"parity_{precision}_{case}", 600, parity, "--case", case),
                *("--precision", precision, "--ranks", ranks, "--work", out / "work"),
                *("--out", results / "parity.jsonl", f"--device={device}"),
                # The others are compared with the baselines.
                has_company=beside and not case.startswith(BASELINE),
                skipped="needs Transformer Engine" if case in of_engine and not has_engine else "",
            )
            for case in cases
        ]
        for precision, cases in (("fp32", plain), ("bf16", in_bf16))
    }
    sanitized = [
        step(
            *(f"sanitizer_{case}", 600, parity, "--sanitize", "--case", case),
            *("--ranks", ranks, "--work", out / "work", f"--device={device}"),
            has_company=beside,
        )
        for case in (() if is_virtual else plain[1:])  # Virtual devices look for races themselves.
    ]
    virtual_overlap = ("--device=virtual", "--rounds=1", "--iterations=4")
    return [
        Step("doctor", (python, "-m", "megatron_fssdp", "doctor", "--issue"), 300),
        replace(gpu_tests, environment={}) if is_virtual else gpu_tests,
        *trainings["fp32"],
        benchmark("gpu_kernels", 180, *(("--device=virtual",) if is_virtual else ())),
        benchmark("gpu_layer", 900, skipped="needs a GPU" if is_virtual else ""),
        *trainings["bf16"],
        *sanitized,
        benchmark(
            *("overlap", 1800, f"--ranks={ranks}"),
            *(virtual_overlap if is_virtual else ("--device=cuda", "--size=gpu")),
            skipped="needs two devices" if device == "one-card" else "",
        ),
    ]


def num_gpus() -> int:
    """Ask torch for the GPUs in a process of its own, because a broken driver may hang or kill it.

    Raises:
        ConfigurationError: torch cannot say.
    """
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
        )
        return int(done.stdout.split()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigurationError(
            f"devices: torch cannot count them ({error}), wanted a torch that works; run megatron-fssdp "
            f"doctor"
        ) from None


def empty(out: Path) -> None:
    """Remove the files of an earlier check. Other files are never deleted.

    Raises:
        ConfigurationError: The folder has files that are not from a check.
    """
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not ((out / "logs" / "doctor.txt").exists() or (out / PAGE).exists()):
        raise ConfigurationError(
            f"--out {out}: has other files, wanted an empty folder or one of an earlier check; give another "
            f"one"
        )
    for name in ("logs", "results", "work"):
        shutil.rmtree(out / name, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
