"""The program of a rank of ``benchmarks/overlap.py``: it trains, and records the time of every iteration.

The launcher runs it in place of a training script, with the folder of the reports, the kind of trace and
Megatron's arguments.
"""

import dataclasses
import json
import os
import runpy
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fssdp.reporting.chrome_trace import TraceSpan

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"
WARM_UP_ITERATIONS = 4
TURNS = (True, False, False, True)  # overlapped or not; in this order a drift affects both equally
COMPUTE, TRANSFERS, WAITS = "compute", "transfers", "waits"


@dataclass(frozen=True)
class Iteration:
    """Times of one rank's iteration, in seconds. Transfers are summed over layers."""

    is_overlapped: bool
    seconds: float
    spag_s: float
    spag_exposed_s: float
    sprs_s: float
    sprs_exposed_s: float


@dataclass
class RankReport:
    """Iterations and time spans that one rank recorded in a training."""

    iterations: list[Iteration] = field(default_factory=list)
    spans: list[TraceSpan] = field(default_factory=list)


def train_on_rank(folder: Path, trace: str, argv: list[str]) -> None:
    """Run the training script and record its iterations. A launcher has registered the plugin before.

    Args:
        folder: Folder to which this rank's report is written.
        trace: ``host`` to record host times of layers and transfers, a path without suffix for torch's
            profiler, or an empty text.
        argv: Megatron's arguments.
    """
    from megatron.training import training

    from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime

    rank = int(os.environ["RANK"])
    report = RankReport()
    profiled = "" if trace in ("", "host") else f"{trace}.rank{rank}.json"
    watch_iterations(MoERuntime, report, rank, trace == "host", profiled)
    if trace == "host":
        hook_layers(training, report, rank)
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    (folder / f"rank{rank}.json").write_text(json.dumps(dataclasses.asdict(report)))


def watch_iterations(
    runtime_class: type[Any], report: RankReport, rank: int, traced: bool, profiled: str
) -> None:
    """Switch the overlap on and off by turns, and record the time and the transfers of every iteration.

    Args:
        runtime_class: Class of the plugin's runtime.
        report: Report of this rank, to fill.
        rank: Number of this rank.
        traced: Whether to record spans of the transfers on the host's clock.
        profiled: File for a trace of torch's profiler over the last two iterations, or an empty text.
    """
    import torch
    from torch.profiler import profile

    profiler: Any = None
    begin_iteration, end_iteration = runtime_class.begin_iteration, runtime_class.end_iteration
    groups: list[Any] = []
    begins_s: list[float] = []

    def begin(runtime: Any, *args: Any) -> None:
        nonlocal profiler
        if profiled and len(begins_s) == WARM_UP_ITERATIONS:
            profiler = profile()
            profiler.start()
        if not groups:
            groups.extend(layer.groups for layer in runtime.layers)
        is_overlapped = TURNS[len(begins_s) % len(TURNS)]
        for layer, own in zip(runtime.layers, groups, strict=True):
            layer.measure = True  # on every rank; by default only the first device measures
            layer.groups = own if is_overlapped else dataclasses.replace(own, transfers=None)
        if len(begins_s) <= WARM_UP_ITERATIONS:
            report.spans.clear()
        begins_s.append(time.perf_counter())
        begin_iteration(runtime, *args)

    def end(runtime: Any) -> Any:
        transfers = [(layer.context.layer, timer) for layer in runtime.layers for timer in layer.journal]
        loads = end_iteration(runtime)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        end_s = time.perf_counter()
        number = len(begins_s)
        if profiler is not None and number == WARM_UP_ITERATIONS + 2:
            profiler.stop()
            profiler.export_chrome_trace(profiled)
        is_overlapped = TURNS[(number - 1) % len(TURNS)]
        if number > WARM_UP_ITERATIONS:
            sums = {
                key: sum(getattr(load, key) for load in loads)
                for key in ("spag_s", "spag_exposed_s", "sprs_s", "sprs_exposed_s")
            }
            report.iterations.append(Iteration(is_overlapped, end_s - begins_s[-1], **sums))
            if traced:
                how = "overlapped" if is_overlapped else "in turn"
                add = report.spans.append
                add(TraceSpan(rank, COMPUTE, f"iteration, transfers {how}", begins_s[-1], end_s))
                for layer, timer in transfers:
                    name = f"{'spAG' if timer.is_gather else 'spRS'} of layer {layer}"
                    if isinstance(timer.begin, float) and isinstance(timer.end, float):
                        add(TraceSpan(rank, TRANSFERS, name, timer.begin, timer.end))
                    for wait in timer.waits:
                        add(TraceSpan(rank, WAITS, f"wait for {name}", *wait))
        return loads

    runtime_class.begin_iteration, runtime_class.end_iteration = begin, end


def hook_layers(training: Any, report: RankReport, rank: int) -> None:
    """Record when the forward and backward passes of transformer layers begin and end."""
    setup = training.setup_model_and_optimizer

    def setup_and_hook(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.transformer.transformer_layer import TransformerLayer

        built = setup(*args, **kwargs)
        latest_s = [0.0]
        for chunk in built[0]:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer):
                    hook_layer(module, report, rank, latest_s)
        return built

    training.setup_model_and_optimizer = setup_and_hook


def hook_layer(layer: Any, report: RankReport, rank: int, latest_s: list[float]) -> None:
    """Add hooks to a layer and to the gradients of its input and output."""
    begins_s: list[float] = []

    def begin(*_: Any) -> None:
        begins_s.append(time.perf_counter())

    def end(name: str) -> None:
        # When a gradient is ready, one layer's backward pass ends and the next one's begins.
        begin_s, latest_s[0] = max(begins_s.pop(), latest_s[0]), time.perf_counter()
        report.spans.append(
            TraceSpan(rank, COMPUTE, f"{name} of layer {layer.layer_number}", begin_s, latest_s[0])
        )

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden.register_hook(lambda gradient: end("backward"))
        begin()

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        end("forward")
        (output[0] if isinstance(output, tuple) else output).register_hook(begin)

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after)


if __name__ == "__main__":
    train_on_rank(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
