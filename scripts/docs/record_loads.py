"""Trains small GPT-MoE models on real texts, and keeps what their loads do between micro-batches.

usage: python scripts/docs/record_loads.py train NAME…          (all without a NAME)
       python scripts/docs/record_loads.py table --result FILE.json    (a result of benchmarks/results)

A training of 2,000 iterations takes minutes on two cores. `train` skips recordings that exist, and writes
``benchmarks/recordings/NAME.npz``: ``counts_IZLDE`` (uint16), ``iterations``, ``layers``, ``last_loss``.
Shape letters: I iterations, Z micro-batches, L MoE layers, D devices, E experts.
"""

import argparse
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
# Another checkout may be installed, but the numbers must be those of this one.
sys.path.insert(0, str(ROOT))

from benchmarks.result_file import write_result  # noqa: E402
from megatron_fssdp.records.loads import read_micro_batch_loads  # noqa: E402
from megatron_fssdp.records.metrics import read_metrics  # noqa: E402
from megatron_fssdp.report.load_changes import LOAD_CHANGES, load_changes  # noqa: E402

RECORDINGS = ROOT / "benchmarks" / "recordings"
STRETCH, MOST_BYTES = 10, 2_000_000
"""Iterations in a row that are kept, and bytes of a file."""
DEVICES, SLOTS, MOST = 8, 2, 50
"""Devices of the table, among which each recorded source is divided evenly; its slots and micro-batches."""

MODELS: dict[str, dict[str, object]] = {
    "16-top-2": {"num_experts": 16, "moe_router_topk": 2, "moe_ffn_hidden_size": 128},
    "64-top-8": {"num_experts": 64, "moe_router_topk": 8, "moe_ffn_hidden_size": 64},
}
BALANCING: dict[str, dict[str, object]] = {
    "aux-1e-2": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2},
    "aux-1e-3": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3},
    "none": {"moe_router_load_balancing_type": "none"},
    "bias": {
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
    },
}
SETTINGS: dict[str, object] = {
    "model.num_layers": 2,
    "parallelism.nproc_per_node": 1,
    "parallelism.declared_nodes": 1,
    "parallelism.expert_model_parallel_size": 1,
    "training.device": "cpu",
    "training.micro_batch_size": 8,
    "training.global_batch_size": 32,  # four micro-batches
    "training.lr_warmup_iters": 50,
    "training.log_interval": 100,
    "training.save_checkpoints": False,
    "training.distributed_timeout_minutes": 300,
}
NAMES = [
    *(f"sources-16-top-2-{balancing}" for balancing in BALANCING),
    *(f"sources-64-top-8-{balancing}" for balancing in BALANCING),
    *(f"topics-{model}-{balancing}" for model in MODELS for balancing in ("aux-1e-2", "none")),
]
"""Text, model and balancing, the most important first."""


def built_text(text: str, out: Path) -> Path:
    """The tokens of Python's sources, or of the prose that explains Python in its ``help()``."""
    folder = out / f"data-{text}"
    paths: list[str] = []
    if text == "topics":
        file = out / "topics.txt"
        file.write_text("\n\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
        paths = [str(file)]
    megatron_fssdp("data", "build", *paths, "--out", str(folder), "--vocab-size", "512")
    return folder


def megatron_fssdp(*words: str) -> None:
    """Run a command of the package."""
    subprocess.run([sys.executable, "-m", "megatron_fssdp.cli.app", *words], check=True, cwd=ROOT)


def train(name: str, out: Path, iterations: int) -> None:
    """Train one model from its start."""
    text, model, balancing = split(name)
    settings = {**SETTINGS, "data.path": built_text(text, out)}
    settings |= {f"model.{key}": value for key, value in {**MODELS[model], **BALANCING[balancing]}.items()}
    words = [
        f"--set={key}={str(value).lower() if value in (True, False) else value}"
        for key, value in settings.items()
    ]
    config = str(ROOT / "configs" / "gpt_moe_tiny.yaml")
    strategy = ("--moe-strategy", "ep", "--iters", str(iterations), "--out", str(out / name), "--overwrite")
    megatron_fssdp("train", config, *strategy, *words)


def split(name: str) -> tuple[str, str, str]:
    """Text, model and balancing of a recording."""
    text, _, rest = name.partition("-")
    model = next(model for model in MODELS if rest.startswith(model))
    return text, model, rest[len(model) + 1 :]


def keep(name: str, out: Path) -> None:
    """Write as many stretches of iterations as fit, evenly chosen."""
    loads = read_micro_batch_loads(out / name)
    last_loss = read_metrics(out / name)[-1].lm_loss
    num, path = len(loads.iterations) // STRETCH, RECORDINGS / f"{name}.npz"
    assert loads.counts_IZLDE.max() < 2**16
    for every in range(1, num + 1):
        chosen = (np.arange(0, num, every)[:, None] * STRETCH + np.arange(STRETCH)).ravel()
        counts = loads.counts_IZLDE[chosen].astype(np.uint16)
        arrays = {"iterations": loads.iterations[chosen], "layers": loads.layers, "last_loss": last_loss}
        np.savez_compressed(path, counts_IZLDE=counts, **arrays)
        if path.stat().st_size <= MOST_BYTES:
            print(f"{path}: every {every}. stretch of {STRETCH} iterations, {path.stat().st_size:,} bytes")
            return


def rows_of(name: str) -> list[list[object]]:
    """The figures of each layer on more devices than were recorded."""
    recording = np.load(RECORDINGS / f"{name}.npz")
    counts_IZLDE, iterations = recording["counts_IZLDE"].astype(np.int64), recording["iterations"]
    times = DEVICES // counts_IZLDE.shape[3]
    counts_IZLDE = np.repeat(counts_IZLDE, times, axis=3) / times
    figures = [
        load_changes(counts_IZLDE[:, :, layer], iterations, SLOTS, MOST)
        for layer in range(counts_IZLDE.shape[2])
    ]
    return [[*split(name), *(round(float(figure), 3) for figure in np.mean(figures, axis=0))]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("train", "table"))
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--out", type=Path, default=Path("runs/recordings"))
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--result", type=Path)
    asked = parser.parse_args()
    if asked.step == "train":
        for name in asked.names:
            if not (RECORDINGS / f"{name}.npz").exists():
                train(name, asked.out.resolve(), asked.iterations)
                keep(name, asked.out.resolve())
    else:
        rows = [row for name in NAMES if (RECORDINGS / f"{name}.npz").exists() for row in rows_of(name)]
        question = "What do real loads do between micro-batches, and which part could replicas remove?"
        write_result(asked.result, question, ("text", "model", "balancing", *LOAD_CHANGES), rows)
