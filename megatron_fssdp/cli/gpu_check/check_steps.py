"""The steps of a check, in order."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_fssdp.cli.gpu_check.check_plan import REPORT_VARIABLE, CheckPlan, Precision
from megatron_fssdp.cli.gpu_check.parity import BASELINE, CASES, ParityCase, compared, training_command
from megatron_fssdp.cli.gpu_check.step import Step
from megatron_fssdp.config.strategy.strategy_settings import PROFILE_VARIABLE

DOCTOR, GPU_LAYER, OVERLAP, HOST_WORK = "doctor", "gpu-layer", "overlap", "host-work"

_NO_CHECKOUT = "not a checkout of the project: {} is missing"
_ON_CUDA = {"MEGATRON_FSSDP_DEVICE": "cuda"}


def check_steps(plan: CheckPlan) -> list[Step]:
    """Return all steps of a check, in order.

    Args:
        plan: What the check runs on.
    """
    return [
        _doctor(plan),
        _gpu_tests(plan),
        *_trainings(plan),
        _gpu_layer(plan),
        _overlap(plan),
        _host_work(plan),
    ]


def parity_trainings(plan: CheckPlan) -> Sequence[tuple[ParityCase, Precision]]:
    """Return the trainings whose losses are compared. The baseline of each precision comes first.

    Virtual devices train in bf16 only where other code runs than in fp32.

    Args:
        plan: What the check runs on.
    """
    few = {BASELINE, "fssdp-rematerialized"}
    return [
        (case, precision)
        for precision in Precision
        for case in CASES
        if precision is Precision.FP32 or not plan.is_virtual or case.name in few
    ]


def _doctor(plan: CheckPlan) -> Step:
    return Step(
        DOCTOR,
        "megatron-fssdp doctor: versions, Megatron's seams, devices",
        (sys.executable, "-m", "megatron_fssdp", "doctor"),
        limit_s=300,
        environment={"COLUMNS": "150"},
    )


def _gpu_tests(plan: CheckPlan) -> Step:
    tests = plan.root / "tests"
    # Virtual devices have no times.
    virtual = ("--virtual-gpu", "-k", "not timed_on_the_device") if plan.is_virtual else ()
    return Step(
        "gpu-tests",
        "tests that need a GPU (pytest -m gpu)",
        (
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu and not slow"),
            *("--rootdir", str(plan.root), "-c", str(plan.root / "pyproject.toml"), str(tests)),
            *virtual,
        ),
        limit_s=1200,
        environment={} if plan.is_virtual else _ON_CUDA,
        skipped=_missing(tests),
    )


def _trainings(plan: CheckPlan) -> list[Step]:
    return [_training(plan, case, precision) for case, precision in parity_trainings(plan)]


def _training(plan: CheckPlan, case: ParityCase, precision: Precision) -> Step:
    settings = ", ".join(f"{key}={value}" for key, value in case.settings.items())
    against = "the baseline" if case.name == BASELINE else f"losses against {BASELINE}"
    return Step(
        case.training_name(precision),
        f"training with {case.strategy}{f' ({settings})' if settings else ''} in {precision}: {against}",
        training_command(plan, case, precision, sys.executable),
        limit_s=600,
        # Costs decide early, so that few iterations are enough.
        environment={PROFILE_VARIABLE: "2", **_environment(plan, case.training_name(precision))},
        judge=lambda: compared(plan, case, precision).problem,
    )


def _gpu_layer(plan: CheckPlan) -> Step:
    script = plan.root / "benchmarks" / "gpu_layer.py"
    size = ("--virtual", "--repetitions", "2") if plan.is_virtual else ()
    return Step(
        GPU_LAYER,
        "one MoE layer on one device against Megatron's own layers",
        (sys.executable, str(script), *_written(plan, "gpu_layer"), *size),
        limit_s=1200,
        environment=_environment(plan, GPU_LAYER),
        skipped=_missing(script),
    )


def _overlap(plan: CheckPlan) -> Step:
    script = plan.root / "benchmarks" / "overlap.py"
    size = (
        ("--device", "virtual", "--rounds", "1", "--iterations", "4")
        if plan.is_virtual
        else ("--device", "cuda", "--size", "gpu")
    )
    return Step(
        OVERLAP,
        "how much of the replicas' transfers is hidden under compute",
        (sys.executable, str(script), "--ranks", str(plan.num_ranks), *_written(plan, "overlap"), *size),
        limit_s=1800,
        environment=_environment(plan, OVERLAP),
        skipped=_missing(script) or ("needs two devices" if plan.num_ranks < 2 else ""),
    )


def _host_work(plan: CheckPlan) -> Step:
    script = plan.root / "benchmarks" / "host" / "host_work.py"
    return Step(
        HOST_WORK,
        "host synchronizations and operators of a layer, counted on virtual devices",
        (sys.executable, str(script)),
        limit_s=1200,
        environment={"COLUMNS": "150"},
        skipped=_missing(script),
    )


def _environment(plan: CheckPlan, step: str) -> dict[str, str]:
    if not plan.is_virtual:
        return _ON_CUDA
    # The virtual ranks share the cores of this machine.
    return {**_ON_CUDA, "OMP_NUM_THREADS": "1", REPORT_VARIABLE: str(plan.findings / step)}


def _written(plan: CheckPlan, name: str) -> tuple[str, ...]:
    """Options that tell a benchmark where to write its numbers and its trace."""
    out, trace = plan.results / f"{name}.json", plan.results / f"{name}_trace.json"
    return ("--out", str(out), "--trace", str(trace))


def _missing(path: Path) -> str:
    return "" if path.exists() else _NO_CHECKOUT.format(path)
