"""Measures how much of the replicas' transfers is hidden under compute, in real trainings.

    python benchmarks/overlap.py [--size tiny] [--ranks 2] [--rounds 2] [--out o.json]
    python benchmarks/overlap.py --device cuda --size gpu --ranks 8       # one rank for each GPU, in bf16

Ranks run on CPUs over gloo by default.

Every round trains Megatron's GPT through the launcher once in each setting. Settings are different numbers of
micro-batches, with and without re-materialization. Within a training, iterations with and without overlapped
transfers alternate (on, off, off, on), so that both see the same load of the machine and the same routing.

Hidden share = 1 - exposed / busy, over all ranks and layers of an iteration. Busy is the time that lanes
spend on transfers. Exposed is the part of it in which compute waits. If there are more ranks than cores, a
hidden transfer takes cores from the compute that hides it. Then the ratio of iteration seconds says more than
the hidden share.

``--device virtual`` runs the CUDA code on virtual devices (``tests.support.virtual_cuda``). Times
then mean nothing and are not written. Races and other faults make the benchmark fail.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.overlap_on_rank import TURNS, WARM_UP_ITERATIONS, Iteration

SIZES = {
    "tiny": "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --seq-length 128 --micro-batch-size 4",
    "small": "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --seq-length 256 --micro-batch-size 4",
    "gpu": "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 4096 --num-attention-heads 16 "
    "--seq-length 2048 --max-position-embeddings 2048 --bf16 --micro-batch-size 2",
}
ARGUMENTS = """
    --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0 --max-position-embeddings 256
    --lr 1e-3 --lr-decay-style constant
    --moe-router-topk 2 --moe-router-load-balancing-type none --disable-bias-linear
    --moe-token-dispatcher-type alltoall --mock-data --tokenizer-type NullTokenizer --vocab-size 1023
    --seed 1234 --num-workers 0 --split 100,0,0 --log-interval 100000 --eval-iters 0 --eval-interval 100000
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-persist-layer-norm --no-rope-fusion
    --moe-strategy fssdp --moe-strategy-set slots=2 --moe-strategy-set overlap_degree=8
    --moe-strategy-set reshard_interval=0
"""
UNCOMPILED = """
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --disable-jit-fuser
"""


@dataclass(frozen=True)
class Devices:
    """How the ranks of a training are started on one kind of device.

    Attributes:
        launcher: Words that run the training script on every rank.
        arguments: Megatron's arguments for these devices.
        environment: Environment variables of the ranks.
    """

    launcher: tuple[str, ...]
    arguments: str
    environment: dict[str, str]


PLUGIN = ("-m", "megatron_fssdp")
DEVICES = {
    "cpu": Devices(
        PLUGIN,
        f"--distributed-backend gloo --use-cpu-initialization {UNCOMPILED}",
        {"MEGATRON_FSSDP_DEVICE": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"},
    ),
    "cuda": Devices(PLUGIN, "--distributed-backend nccl", {"MEGATRON_FSSDP_DEVICE": "cuda"}),
    "virtual": Devices(
        ("-m", "tests.support.virtual_cuda", *PLUGIN),
        f"--distributed-backend nccl {UNCOMPILED}",
        {"MEGATRON_FSSDP_DEVICE": "cuda", "OMP_NUM_THREADS": "1"},
    ),
}
ON_RANK = Path(__file__).with_name("overlap_on_rank.py")
TIMEOUT_S = 900


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
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--iterations", type=int, default=16, help="measured iterations of a training, a multiple of 4"
    )
    parser.add_argument("--out", type=Path, default=Path("overlap.json"))
    options = parser.parse_args()
    numbers = (2,) if options.device == "virtual" else (1, 4)
    settings = [Setting(number, again) for number, again in product(numbers, (False, True))]
    print(
        f"{options.ranks} ranks ({options.device}) on {os.cpu_count()} cores, {options.size} model. "
        f"{competition(options)}"
    )
    runs: dict[Setting, list[list[list[Iteration]]]] = {setting: [] for setting in settings}
    for number in range(options.rounds):
        for setting in settings:
            runs[setting].append(train(options, setting))
            print(f"round {number + 1}: {setting}", flush=True)
    if options.device == "virtual":
        summaries: list[dict[str, Any]] = [{"setting": str(one), "virtual": "no times"} for one in settings]
    else:
        summaries = [summary(setting, of_rounds) for setting, of_rounds in runs.items()]
    for one in summaries:
        print_summary(one)
    facts = {"cores": os.cpu_count(), "note": competition(options)}
    written = {key: str(value) for key, value in vars(options).items()}
    record = {"machine": facts, "options": written, "summaries": summaries}
    options.out.write_text(json.dumps(record, indent=1))
    print(f"wrote {options.out}")


def competition(options: argparse.Namespace) -> str:
    """Return a sentence on whether ranks compete for cores on this machine."""
    if options.device == "cuda":
        return "Every rank has a GPU."
    if options.device == "virtual":
        return "Virtual devices: no times."
    if options.ranks * 2 <= (os.cpu_count() or 1):
        return "Every rank has one core for compute and one for transfers."
    return "Ranks compute and transfer on the same cores: a hidden share near 1 does not prove a gain."


def train(options: argparse.Namespace, setting: Setting) -> list[list[Iteration]]:
    """Run one training under torchrun and return the iterations of each rank.

    A training that fails ends this process: its last output is printed, and the exit code is torchrun's.
    """
    measured = len(TURNS) * max(1, options.iterations // len(TURNS))
    micro_batch = int(SIZES[options.size].split()[-1])
    devices = DEVICES[options.device]
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={options.ranks}", *devices.launcher, str(ON_RANK), folder),
            *shlex.split(ARGUMENTS),
            *shlex.split(devices.arguments),
            *shlex.split(SIZES[options.size]),
            *("--num-experts", str(max(8, options.ranks))),
            *("--expert-model-parallel-size", str(options.ranks)),
            *("--global-batch-size", str(micro_batch * options.ranks * setting.num_micro_batches)),
            *("--train-iters", str(WARM_UP_ITERATIONS + measured)),
            *("--moe-strategy-set", f"rematerialize={str(setting.rematerialize).lower()}"),
            *("--data-cache-path", f"{tempfile.gettempdir()}/overlap-benchmark-data"),
        ]
        environment = {**os.environ, **devices.environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, env=environment, timeout=TIMEOUT_S, **pipes)
        if done.returncode:
            print(done.stdout[-6000:], file=sys.stderr)
            sys.exit(done.returncode)
        texts = [(Path(folder) / f"rank{rank}.json").read_text() for rank in range(options.ranks)]
    return [[Iteration(**one) for one in json.loads(text)] for text in texts]


def summary(setting: Setting, rounds: list[list[list[Iteration]]]) -> dict[str, Any]:
    """Return quartiles over the iterations of all rounds. The slowest rank sets the time of an iteration."""
    turns: dict[bool, list[tuple[Iteration, ...]]] = {True: [], False: []}
    ratios = []
    for ranks in rounds:
        iterations = list(zip(*ranks, strict=True))
        for of_ranks in iterations:
            turns[of_ranks[0].is_overlapped].append(of_ranks)
        for one, other in zip(iterations[::2], iterations[1::2], strict=True):
            on, off = (one, other) if one[0].is_overlapped else (other, one)
            ratios.append(slowest_s(on) / slowest_s(off))
    return {
        "setting": str(setting),
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
    if "virtual" in one:
        print(f"{one['setting']}: ran on virtual devices, no times")
        return

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
