"""Measures how much of the replicas' transfers is hidden under compute, in real trainings on gloo ranks.

    python benchmarks/overlap.py [--size tiny] [--ranks 2] [--rounds 2] [--out o.json] [--trace t.json]

Every round trains Megatron's GPT through the launcher once in each setting. Settings are different numbers of
micro-batches, with and without re-materialization. Within a training, iterations with and without overlapped
transfers alternate (on, off, off, on), so that both see the same load of the machine and the same routing.

Hidden share = 1 - exposed / busy, over all ranks and layers of an iteration. Busy is the time that lanes
spend on transfers. Exposed is the part of it in which compute waits. If there are more ranks than cores, a
hidden transfer takes cores from the compute that hides it. Then the ratio of iteration seconds says more than
the hidden share.

``--trace`` writes a Chrome trace of the last two iterations of one more training. The first of them is
overlapped.
"""

import argparse
import atexit
import contextlib
import dataclasses
import io
import json
import logging
import os
import platform
import shlex
import statistics
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from megatron_fssdp.reporting.chrome_trace import TraceSpan, write_chrome_trace
from megatron_fssdp.testing import run_ranks
from megatron_fssdp.testing.parallel_state import MEGATRON_PRELOAD

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"
SIZES = {
    "tiny": "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --seq-length 128 --micro-batch-size 4",
    "small": "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --seq-length 256 --micro-batch-size 4",
}
ARGUMENTS = """
    --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0 --max-position-embeddings 256
    --lr 1e-3 --lr-decay-style constant
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none --disable-bias-linear
    --moe-token-dispatcher-type alltoall --mock-data --tokenizer-type NullTokenizer --vocab-size 1023
    --seed 1234 --num-workers 0 --split 100,0,0 --log-interval 100000 --eval-iters 0 --eval-interval 100000
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
    --no-rope-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion
    --disable-jit-fuser --moe-strategy fssdp --moe-strategy-set slots=2 --moe-strategy-set overlap_degree=8
    --moe-strategy-set reshard_interval=0
"""
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


@dataclass(frozen=True)
class Setting:
    """Settings in which the trainings of a round differ."""

    num_micro_batches: int
    rematerialize: bool

    def __str__(self) -> str:
        return f"{self.num_micro_batches} micro-batches" + (", re-materialized" if self.rematerialize else "")


def main() -> None:
    """Measure, print one block for each setting, and write all results to a JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--iterations", type=int, default=16, help="measured iterations of a training, a multiple of 4"
    )
    parser.add_argument("--out", type=Path, default=Path("overlap.json"))
    parser.add_argument("--trace", type=Path, help="also write a Chrome trace to this file")
    options = parser.parse_args()
    settings = [Setting(number, again) for number, again in product((1, 4), (False, True))]
    print(
        f"{options.ranks} ranks on {os.cpu_count()} cores, {options.size} model. {competition(options.ranks)}"
    )
    runs = []
    for number in range(options.rounds):
        for setting in settings:
            load = os.getloadavg()[0]
            reports = train(options, setting)
            runs.append((setting, load, [report.iterations for report in reports]))
            print(f"round {number + 1}: {setting}: load average before it {load:.1f}", flush=True)
    summaries = [summary(setting, [run for run in runs if run[0] == setting]) for setting in settings]
    for one in summaries:
        print_summary(one)
    options.out.write_text(
        json.dumps(
            {
                "machine": {
                    "cores": os.cpu_count(),
                    "processor": platform.processor() or platform.machine(),
                    "note": competition(options.ranks),
                },
                "options": {key: str(value) for key, value in vars(options).items()},
                "summaries": summaries,
                "runs": [
                    {
                        "setting": dataclasses.asdict(setting),
                        "load_average_before": load,
                        "ranks": [[dataclasses.asdict(one) for one in rank] for rank in ranks],
                    }
                    for setting, load, ranks in runs
                ],
            },
            indent=1,
        )
    )
    print(f"wrote {options.out}")
    if options.trace is not None:
        reports = train(options, Setting(2, False), traced=True)
        write_chrome_trace(options.trace, [span for report in reports for span in report.spans])
        print(f"wrote {options.trace}")


def competition(num_ranks: int) -> str:
    """Return a sentence on whether ranks compete for cores on this machine."""
    cores = os.cpu_count() or 1
    if num_ranks * 2 <= cores:
        return "Every rank has one core for compute and one for transfers."
    return (
        "Ranks compute and transfer on the same cores. Hidden transfers slow down the compute that hides "
        "them, so a hidden share near 1 does not prove that time was saved."
    )


def train(options: argparse.Namespace, setting: Setting, *, traced: bool = False) -> list[RankReport]:
    """Run one training and return the report of each rank."""
    measured = len(TURNS) * max(1, options.iterations // len(TURNS))
    micro_batch = int(SIZES[options.size].split()[-1])
    argv = [
        str(SCRIPT),
        *shlex.split(ARGUMENTS),
        *shlex.split(SIZES[options.size]),
        *("--expert-model-parallel-size", str(options.ranks)),
        *("--global-batch-size", str(micro_batch * options.ranks * setting.num_micro_batches)),
        *("--train-iters", str(WARM_UP_ITERATIONS + (2 if traced else measured))),
        *("--moe-strategy-set", f"rematerialize={str(setting.rematerialize).lower()}"),
        *("--data-cache-path", "/tmp/overlap-benchmark-data"),
    ]
    results = run_ranks(
        train_on_rank,
        options.ranks,
        argv,
        traced,
        timeout_s=600,
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "LOCAL_WORLD_SIZE": str(options.ranks)},
        preload=MEGATRON_PRELOAD,
    )
    return [RankReport([Iteration(**one) for one in iterations], spans) for iterations, spans in results]


def train_on_rank(rank: int, world_size: int, argv: list[str], traced: bool) -> tuple[Any, list[TraceSpan]]:
    """Launch the training script and record its iterations.

    The report is plain data, because ranks cannot send back objects of a script's own classes.
    """
    from megatron.training import training

    from megatron_fssdp.megatron_adapter.entry.launcher import launch
    from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime

    logging.disable(logging.WARNING)
    report = RankReport()
    watch_iterations(MoERuntime, report, rank, traced)
    if traced:
        hook_layers(training, report, rank)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            launch(argv)
    except SystemExit as request:
        if request.code:
            raise RuntimeError(output.getvalue()[-3000:]) from None
    atexit._run_exitfuncs()
    return [dataclasses.asdict(one) for one in report.iterations], report.spans


def watch_iterations(runtime_class: type[Any], report: RankReport, rank: int, traced: bool) -> None:
    """Switch the overlap on and off by turns, and record the time and the transfers of every iteration."""
    begin_iteration, end_iteration = runtime_class.begin_iteration, runtime_class.end_iteration
    groups: list[Any] = []
    begins_s: list[float] = []

    def begin(runtime: Any, *args: Any) -> None:
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
        transfers = [(layer.context.layer, started) for layer in runtime.layers for started in layer._journal]
        loads = end_iteration(runtime)
        end_s = time.perf_counter()
        number = len(begins_s)
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
                for layer, started in transfers:
                    name = f"{'spAG' if started.is_gather else 'spRS'} of layer {layer}"
                    timer = started.timer
                    if timer.end_s:
                        add(TraceSpan(rank, TRANSFERS, name, timer.begin_s, timer.end_s))
                    for wait_begin_s, wait_end_s in timer.waits_s:
                        add(TraceSpan(rank, WAITS, f"wait for {name}", wait_begin_s, wait_end_s))
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


def summary(setting: Setting, runs: list[tuple[Setting, float, list[list[Iteration]]]]) -> dict[str, Any]:
    """Return quartiles over the iterations of all rounds. The slowest rank sets the time of an iteration."""
    turns: dict[bool, list[tuple[Iteration, ...]]] = {True: [], False: []}
    ratios = []
    for _, _, ranks in runs:
        iterations = list(zip(*ranks, strict=True))
        for of_ranks in iterations:
            turns[of_ranks[0].is_overlapped].append(of_ranks)
        for one, other in zip(iterations[::2], iterations[1::2], strict=True):
            on, off = (one, other) if one[0].is_overlapped else (other, one)
            ratios.append(slowest_s(on) / slowest_s(off))
    return {
        "setting": str(setting),
        "load_averages_before": [load for _, load, _ in runs],
        "seconds_overlapped": quartiles([slowest_s(ranks) for ranks in turns[True]]),
        "seconds_in_turn": quartiles([slowest_s(ranks) for ranks in turns[False]]),
        "overlapped_over_in_turn": quartiles(ratios),
        **{
            f"{kind}_hidden_share_{name}": quartiles([hidden_share(ranks, kind) for ranks in turns[is_on]])
            for kind in ("spag", "sprs")
            for name, is_on in (("overlapped", True), ("in_turn", False))
        },
    }


def slowest_s(ranks: tuple[Iteration, ...]) -> float:
    """Return the seconds of an iteration on the slowest rank."""
    return max(one.seconds for one in ranks)


def hidden_share(ranks: tuple[Iteration, ...], kind: str) -> float | None:
    """Return the hidden share of one iteration over all ranks, or None without transfers.

    Args:
        ranks: Times of the iteration on each rank.
        kind: ``spag`` for weights or ``sprs`` for gradients.
    """
    busy_s = sum(getattr(one, f"{kind}_s") for one in ranks)
    return 1 - sum(getattr(one, f"{kind}_exposed_s") for one in ranks) / busy_s if busy_s else None


def quartiles(values: list[Any]) -> list[float] | None:
    """Return the 25th, 50th and 75th percentile of the values that are not None."""
    known = [value for value in values if value is not None]
    return statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else None


def print_summary(one: dict[str, Any]) -> None:
    """Print medians and quartiles of one setting."""

    def shown(key: str, scale: float = 1.0, digits: int = 2) -> str:
        found = one[key]
        if found is None:
            return "nothing"
        low, median, high = (f"{value * scale:.{digits}f}" for value in found)
        return f"{median} ({low}-{high})"

    print(
        f"{one['setting']}\n"
        f"  hidden share, overlapped: spAG {shown('spag_hidden_share_overlapped')}, "
        f"spRS {shown('sprs_hidden_share_overlapped')}; in turn: spAG {shown('spag_hidden_share_in_turn')}, "
        f"spRS {shown('sprs_hidden_share_in_turn')}\n"
        f"  iteration: overlapped {shown('seconds_overlapped', 1e3, 0)} ms, in turn "
        f"{shown('seconds_in_turn', 1e3, 0)} ms, ratio pair by pair {shown('overlapped_over_in_turn')}"
    )


if __name__ == "__main__":
    main()
