"""What uneven loads cost on a GPU: several ranks share one card, and compute one after the other.

    python -m benchmarks.gpu_turns [--sizes small,coarse,fine] [--workload W1] [--out FILE.json]

The layers are those of the testbed (``benchmarks.testbed``), with real experts in bf16. A rank holds the card
while it computes and gives it up while it waits for others. So each rank has the whole GPU, and all of its time
counts: kernels, gaps between them and the host's work. Time on links does not count, because messages travel
through the host. Plans know the throughput that the card reaches, and links as of ``LINKS``. In a real node,
the busiest rank's time is the least that an iteration takes.

``--device cpu`` only shows that the code runs.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.testbed.layer_stack import LayerStack
from benchmarks.testbed.measurement import make_groups
from benchmarks.testbed.slot_stack import SlotStack
from benchmarks.testbed.stack_inputs import (
    IterationInput,
    LayerInput,
    StackSize,
    third_of_balanced_iteration_s,
)
from benchmarks.testbed.testbed_loads import device_max_over_mean
from megatron_fssdp.collectives.device_clock import elapsed_s
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape
from megatron_fssdp.strategies.registry import build_strategy
from tests.support import one_card
from tests.support.virtual_cuda.posing.patches import Patches

RANKS, NODES = 4, 2
LINKS = {"intra": LinkCost(5e-6, 1 / 200e9), "inter": LinkCost(10e-6, 1 / 50e9)}
"""What plans believe: NVLink inside a node, and a network of 400 Gb/s for each GPU."""

# Layers, experts, top-k, hidden and ffn sizes, tokens of a rank; two matrices in each expert.
SIZES = {
    "toy": StackSize(2, 8, 2, 32, 64, 64, 2),
    "small": StackSize(2, 16, 2, 1024, 4096, 8192, 2),
    "coarse": StackSize(2, 8, 2, 4096, 14336, 4096, 2),
    "fine": StackSize(2, 64, 8, 7168, 2048, 2048, 2),
}
SLOTS = 4
VARIANTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ep": {},
    "fssdp": {"slots": SLOTS, "reshard_interval": 0},
}
WARM_UP = 3  # the second plan is the first that knows loads


class Turns:
    """The time in which a rank has the card. Without a lock, ranks compute at once.

    Attributes:
        seconds: Time since the last reset.
    """

    def __init__(self, lock: TextIO | None) -> None:
        self._lock, self._since_s, self.seconds = lock, 0.0, 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Hold the card."""
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Give the card to others while this rank waits; nothing if it does not hold the card."""
        if not self._since_s or self._lock is None:
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._since_s = time.perf_counter()

    def _give(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.seconds += time.perf_counter() - self._since_s
        self._since_s = 0.0
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def main() -> int:
    """Start the ranks, or measure on one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="small,coarse,fine", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--workload", choices=WORKLOADS, default="W1")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return 0
    with tempfile.NamedTemporaryFile(prefix="turns-") as lock:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        environment = {**os.environ, "TURNS": lock.name, "MEGATRON_FSSDP_DEVICE": options.device}
        command = [sys.executable, *words, "-m", "benchmarks.gpu_turns", *sys.argv[1:]]
        return subprocess.run(command, env=environment).returncode


def measure(options: argparse.Namespace) -> None:
    """Measure all sizes on this rank. The first rank prints, and writes the results after each size."""
    on_gpu = options.device == "cuda"
    with Patches() as patches, open(os.environ["TURNS"]) as lock:
        turns = Turns(lock if on_gpu else None)
        one_card.CardGroups(poses=on_gpu, around_waits=turns.aside).install(patches)
        if on_gpu:
            torch.cuda.set_device(0)
        else:
            from megatron_fssdp.megatron_adapter.cpu import cpu_runtime

            cpu_runtime.install()
        dist.init_process_group("nccl" if on_gpu else "gloo")
        card = torch.cuda.get_device_name() if on_gpu else "CPU"
        record: dict[str, Any] = {
            "date": str(date.today()),
            "card": f"{card}, torch {torch.__version__}",
            "ranks": RANKS,
            "workload": options.workload,
            "links": {name: asdict(link) for name, link in LINKS.items()},
            "sizes": {},
        }
        for name in options.sizes.split(","):
            found = record["sizes"][name] = measure_size(
                SIZES[name], options, turns, torch.device(options.device)
            )
            if dist.get_rank() == 0:
                print("\n".join(lines(name, found)), flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps(record, indent=1))
        dist.destroy_process_group()


def measure_size(
    size: StackSize, options: argparse.Namespace, turns: Turns, device: torch.device
) -> dict[str, Any]:
    """Return the results of all variants, which take the same iterations one after the other."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    groups = make_groups(NODES)
    rank = groups.device
    cluster = ClusterCost(LINKS["intra"], LINKS["inter"], matrix_flops_per_s(size, turns, device, dtype))
    before_s = third_of_balanced_iteration_s(size, groups.topology, cluster)
    profile = LayerProfile(
        before_s, cluster, size.expert_bytes, size.token_bytes, size.flops_per_token, SLOTS
    )
    owned = np.flatnonzero(even_owners(size.num_experts, RANKS) == rank).tolist()
    parameters = [
        {expert: make_expert(size, device, dtype) for expert in owned} for _ in range(size.num_layers)
    ]
    stacks: dict[str, LayerStack] = {}
    for name, settings in VARIANTS.items():
        if settings is None:
            stacks[name] = PlainStack(size, groups, parameters, None)
        else:
            strategy = build_strategy(name, STRATEGIES[name].settings.model_validate(settings))
            stacks[name] = StrategyStack(size, groups, parameters, None, strategy=strategy, profile=profile)
    num_iterations = WARM_UP + options.repetitions + 1
    shape = WorkloadShape(RANKS, size.num_experts, size.tokens_per_rank, size.top_k, num_iterations)
    counts_IDE = WORKLOADS[options.workload].counts(shape)
    seconds: dict[str, list[Any]] = {name: [] for name in stacks}  # of each iteration and rank
    others: dict[str, Any] = {}
    for iteration, counts_DE in enumerate(counts_IDE):
        counts_LE = np.stack([counts_DE[rank]] * size.num_layers)
        inputs = moved(IterationInput.draw(counts_LE, size, (iteration, rank)), device, dtype)
        for name, stack in stacks.items():
            is_last = iteration == num_iterations - 1
            with kernels(device) if is_last else nullcontext([]) as seen:
                turns.seconds = 0.0
                with turns.computing():
                    result = stack.run(inputs)
            if is_last:
                others[name] = gathered([*seen, result.replica_bytes])
            elif iteration >= WARM_UP:
                seconds[name].append(gathered([turns.seconds])[:, 0])
    del stacks, stack, result, parameters
    if device.type == "cuda":
        torch.cuda.empty_cache()
    busiest = {name: np.max(found, axis=1) / size.num_layers for name, found in seconds.items()}
    return {
        "size": asdict(size),
        "expert_flops_per_s": cluster.expert_flops_per_s,
        "device_max_over_mean": device_max_over_mean(counts_IDE[WARM_UP]),
        "layer": {
            name: {
                "busiest_s": quartiles(busiest[name]),
                "mean_s": quartiles(np.mean(seconds[name], axis=1) / size.num_layers),
                "none_over_this": quartiles(busiest["none"] / busiest[name]),
                "kernels": int(others[name][:, 0].max()) // size.num_layers,
                "kernels_s": float(others[name][:, 1].max()) / size.num_layers,
                "replica_bytes": int(others[name][:, 2].max()),
            }
            for name in seconds
        },
    }


class PlainStack(LayerStack):
    """The testbed's stack, with probabilities in the data type of the rows."""

    def _experts(self, parameters_U: Any, rows: Any, rows_P: Any, probs: Any, **more: Any) -> torch.Tensor:
        return super()._experts(parameters_U, rows, rows_P, probs.to(rows.dtype), **more)


class StrategyStack(PlainStack, SlotStack):
    """The same under a strategy."""


def make_expert(size: StackSize, device: torch.device, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Return the two matrices of an expert."""
    shapes = (size.ffn_size, size.hidden_size), (size.hidden_size, size.ffn_size)
    drawn = [torch.randn(shape, device=device, dtype=dtype) / shape[1] ** 0.5 for shape in shapes]
    return [torch.nn.Parameter(one) for one in drawn]


def moved(inputs: IterationInput, device: torch.device, dtype: torch.dtype) -> IterationInput:
    """Return the input on the device."""
    return IterationInput(
        inputs.hidden.to(device, dtype),
        tuple(LayerInput(one.routing_map.to(device), one.probs.to(device)) for one in inputs.layers),
        inputs.gradient.to(device, dtype),
    )


def matrix_flops_per_s(size: StackSize, turns: Turns, device: torch.device, dtype: torch.dtype) -> float:
    """Return the throughput on the rows that a rank gets under even loads; the same number on all ranks."""
    rows = size.tokens_per_rank * size.top_k * RANKS // size.num_experts
    x, (fc1, _) = (
        torch.randn(rows, size.hidden_size, device=device, dtype=dtype),
        make_expert(size, device, dtype),
    )
    with turns.computing(), torch.no_grad():
        seconds = [elapsed_s(lambda: [x @ fc1.T for _ in range(20)], device) / 20 for _ in range(5)]
    mine = 2 * rows * size.hidden_size * size.ffn_size / statistics.median(seconds[1:])
    return float(gathered([mine]).mean())


def gathered(values: Sequence[float]) -> np.ndarray:
    """Return the numbers of all ranks, ``[D, numbers]``."""
    of_all: list[Any] = [None] * RANKS
    dist.all_gather_object(of_all, list(values))
    return np.array(of_all, dtype=np.float64)


@contextmanager
def kernels(device: torch.device) -> Iterator[list[float]]:
    """Yield a list that gets the number of kernels of this rank and their seconds; copies are not kernels."""
    found: list[float] = []
    if device.type != "cuda":
        yield found
        found += [0, 0.0]
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield found
    on_card = [one for one in profile.key_averages() if one.device_type == torch.autograd.DeviceType.CUDA]
    own = [one for one in on_card if not one.key.startswith(("Memcpy", "Memset"))]
    found += [sum(one.count for one in own), sum(one.self_device_time_total for one in own) / 1e6]


def quartiles(values: Any) -> list[float]:
    """25th, 50th and 75th percentile."""
    return [float(one) for one in np.percentile(values, (25, 50, 75))]


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """Return the lines to print for one size."""

    def shown(values: Sequence[float], scale: float = 1.0) -> str:
        low, median, high = (f"{value * scale:.2f}" for value in values)
        return f"{median} ({low}-{high})"

    said = [
        f"{name}: {found['size']}; {found['expert_flops_per_s'] / 1e12:.0f} TFLOP/s; "
        f"busiest device {found['device_max_over_mean']:.2f} × mean load"
    ]
    for of, one in found["layer"].items():
        said += [
            f"  {of}: busiest rank {shown(one['busiest_s'], 1e3)} ms a layer, mean {shown(one['mean_s'], 1e3)}; "
            f"none / this {shown(one['none_over_this'])}; {one['kernels']} kernels in "
            f"{one['kernels_s'] * 1e3:.2f} ms; replicas {one['replica_bytes'] / 2**30:.2f} GiB"
        ]
    return said


if __name__ == "__main__":
    sys.exit(main())
