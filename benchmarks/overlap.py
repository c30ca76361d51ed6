"""How much of the replicas' transfers is hidden under compute, in real trainings?

    python benchmarks/overlap.py [--size tiny] [--ranks 2] [--rounds 2] [--out o.json]
    python benchmarks/overlap.py --device cuda --size gpu --ranks 8       # one rank for each GPU, in bf16

A setting is a number of micro-batches, with or without re-materialization, and then also with puts inside
nodes (``FSSDP_PEER_PUTS``; not on virtual devices). In each round, every setting is trained twice from the
same seed, with ``overlap`` on and off, in alternating order. The figures are those that every run records.
Hidden share = 1 - exposed / busy, over the layers of an iteration. Busy is the time
of the transfers, and exposed the part of it in which compute waits. If there are more ranks than cores, a
hidden transfer takes cores from the compute that hides it. The ratio of iteration seconds says more then.

``--device virtual`` runs the CUDA code on virtual devices (``devtools.virtual_cuda``). Times then mean
nothing and are not written. Races and other faults make the benchmark fail.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_parity import small_training
from benchmarks.result_file import quartiles
from megatron_fssdp.records.recorded_run import RecordedRun, load

SIZES: dict[str, tuple[int, dict[str, int]]] = {
    "tiny": (4, {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "seq_length": 128}),
    "small": (4, {"hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "seq_length": 256}),
    "gpu": (2, {"hidden_size": 2048, "ffn_hidden_size": 4096, "num_attention_heads": 16, "seq_length": 2048}),
}
"""Sequences of a micro-batch, and sizes of the model."""

WARM_UP = 4
TIMEOUT_S = 900
KINDS = ("spag", "sprs")


def main() -> None:
    """Measure, print one block for each setting, and write all results to a JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "virtual"), default="cpu")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=16, help="measured iterations of a training")
    parser.add_argument("--out", type=Path, default=Path("overlap.json"))
    options = parser.parse_args()
    is_virtual, cores = options.device == "virtual", os.cpu_count()
    print(f"{options.ranks} ranks ({options.device}) on {cores} cores, {options.size} model", flush=True)
    summaries: list[dict[str, Any]] = []
    ways = [(False, False), (True, False), *([] if is_virtual else [(True, True)])]
    for number, (again, puts) in product((2,) if is_virtual else (1, 4), ways):
        runs: dict[bool, list[RecordedRun]] = {True: [], False: []}
        for turn in range(options.rounds):
            for overlap in (True, False) if turn % 2 == 0 else (False, True):
                how = {"rematerialize": again, "overlap": overlap, "puts": puts}
                runs[overlap].append(train(options, number, **how))
        name = f"{number} micro-batches" + ", re-materialized" * again + ", by puts" * puts
        summaries.append({"setting": name, **({"virtual": "no times"} if is_virtual else summary(runs))})
        print(shown(summaries[-1]), flush=True)
    written = {key: str(value) for key, value in vars(options).items()}
    record = {"machine": {"cores": cores}, "options": written, "summaries": summaries}
    options.out.write_text(json.dumps(record, indent=1))
    print(f"wrote {options.out}")


def train(
    options: argparse.Namespace, num_micro_batches: int, *, rematerialize: bool, overlap: bool, puts: bool
) -> RecordedRun:
    """Run one training and return its records.

    A training that fails ends this process: its last output is printed, and the exit code is torchrun's.
    """
    micro_batch, sizes = SIZES[options.size]
    batches = {
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * options.ranks * num_micro_batches,
        "train_iters": WARM_UP + options.iterations,
        **({"disable_jit_fuser": True} if options.device == "cpu" else {}),
    }
    settings = {"slots": 2, "overlap_degree": 8, "reshard_interval": 0, "rematerialize": rematerialize}
    strategy = "fssdp", {**settings, "overlap": overlap}
    precision = "bf16" if options.size == "gpu" else "fp32"
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        out = Path(folder) / "run"
        command = small_training(
            *(strategy, options.ranks, out, batches),
            device=options.device,
            precision=precision,
            model=sizes,
        )
        kind = "cpu" if options.device == "cpu" else "cuda"
        environment = {**os.environ, "MEGATRON_FSSDP_DEVICE": kind, "OMP_NUM_THREADS": "1"}
        environment["FSSDP_PEER_PUTS"] = str(int(puts))
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, env=environment, timeout=TIMEOUT_S, **pipes)
        if done.returncode:
            print(done.stdout[-6000:], file=sys.stderr)
            sys.exit(done.returncode)
        run = load(out)
        assert run.arrays  # read while the folder exists
        return run


def summary(runs: dict[bool, list[RecordedRun]]) -> dict[str, Any]:
    """Return quartiles over the iterations of all rounds, with and without overlap."""

    def all_of(overlap: bool, name: str) -> np.ndarray:
        return np.concatenate([run.arrays[name][WARM_UP:] for run in runs[overlap]])

    seconds = {overlap: all_of(overlap, "iteration_s_I") for overlap in runs}
    figures: dict[str, Any] = {
        "seconds_overlapped": quartiles(seconds[True]),
        "seconds_in_turn": quartiles(seconds[False]),
        # The same iterations of both trainings have the same routing.
        "overlapped_over_in_turn": quartiles(seconds[True] / seconds[False]),
    }
    for kind, (overlap, name) in product(KINDS, ((True, "overlapped"), (False, "in_turn"))):
        busy = all_of(overlap, f"{kind}_s_IL").sum(axis=1)
        exposed = all_of(overlap, f"{kind}_exposed_s_IL").sum(axis=1)
        shares = 1 - exposed[busy > 0] / busy[busy > 0]
        figures[f"{kind}_hidden_share_{name}"] = quartiles(shares) if len(shares) else None
    return figures


def shown(figures: dict[str, Any]) -> str:
    """Return one setting's medians and quartiles as text."""
    lines = [figures["setting"]]
    for name, value in figures.items():
        if isinstance(value, list):
            low, median, high = value
            lines.append(f"  {name.replace('_', ' ')}: {median:.3g} ({low:.3g} to {high:.3g})")
    return "\n".join([*lines, *([f"  {figures['virtual']}"] if "virtual" in figures else [])])


if __name__ == "__main__":
    main()
