"""The program of a rank of ``benchmarks/overlap.py``: it trains, and records the time of every iteration.

The launcher runs it in place of a training script, with the folder of the reports and Megatron's arguments.
"""

import json
import os
import runpy
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"
WARM_UP_ITERATIONS = 4
TURNS = (True, False, False, True)  # overlapped or not; in this order a drift affects both equally


@dataclass(frozen=True)
class Iteration:
    """Times of one rank's iteration, in seconds. Transfers are summed over layers."""

    is_overlapped: bool
    seconds: float
    spag_s: float
    spag_exposed_s: float
    sprs_s: float
    sprs_exposed_s: float


def train_on_rank(folder: Path, argv: list[str]) -> None:
    """Run the training script and record its iterations. A launcher has registered the plugin before.

    Args:
        folder: Folder to which this rank's report is written.
        argv: Megatron's arguments.
    """
    from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime

    iterations: list[Iteration] = []
    watch_iterations(MoERuntime, iterations)
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    report = json.dumps([asdict(one) for one in iterations])
    (folder / f"rank{os.environ['RANK']}.json").write_text(report)


def watch_iterations(runtime_class: type[Any], iterations: list[Iteration]) -> None:
    """Switch the overlap on and off by turns, and record the time and the transfers of every iteration.

    Args:
        runtime_class: Class of the plugin's runtime.
        iterations: Iterations after the warm-up, to fill.
    """
    import torch

    begin_iteration, end_iteration = runtime_class.begin_iteration, runtime_class.end_iteration
    groups: list[Any] = []
    begins_s: list[float] = []

    def begin(runtime: Any, *args: Any) -> None:
        if not groups:
            groups.extend(layer.groups for layer in runtime.layers)
        is_overlapped = TURNS[len(begins_s) % len(TURNS)]
        for layer, own in zip(runtime.layers, groups, strict=True):
            layer.measure = True  # on every rank; by default only the first device measures
            layer.groups = own if is_overlapped else replace(own, transfers=None)
        begins_s.append(time.perf_counter())
        begin_iteration(runtime, *args)

    def end(runtime: Any) -> Any:
        loads = end_iteration(runtime)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if len(begins_s) > WARM_UP_ITERATIONS:
            keys = ("spag_s", "spag_exposed_s", "sprs_s", "sprs_exposed_s")
            sums = {key: sum(getattr(load, key) for load in loads) for key in keys}
            is_overlapped = TURNS[(len(begins_s) - 1) % len(TURNS)]
            iterations.append(Iteration(is_overlapped, time.perf_counter() - begins_s[-1], **sums))
        return loads

    runtime_class.begin_iteration, runtime_class.end_iteration = begin, end


if __name__ == "__main__":
    train_on_rank(Path(sys.argv[1]), sys.argv[2:])
