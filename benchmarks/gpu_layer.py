"""What uneven loads cost on a GPU: several ranks share one card, and compute one after the other.

    python benchmarks/gpu_layer.py [--sizes fine,fine*4,small,coarse] [--workload W1] [--out FILE.json]

The layers are Megatron's, with experts in bf16 and with forced routing, under ``none``, ``ep`` and ``fssdp``.
A rank holds the card while it computes, and gives it up while it waits for others. So each rank has the whole
GPU while its kernels run. Their seconds count: on a real node, those of the busiest rank are the least that a
layer takes. Links and the host's work do not count, because each message travels through the host, stops it,
and passes the card on. Plans know the throughput that the card reaches, and links as of ``LINKS``. ``fine*4``
has four micro-batches in an iteration.

``--device cpu`` shows that the code runs. Ranks then compute at once, and the clock counts.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.result_file import quartiles
from benchmarks.testbed.stack_inputs import MicroBatchInput, StackSize, third_of_balanced_iteration_s
from benchmarks.testbed.testbed_loads import device_max_over_mean
from devtools.one_card import CardGroups
from devtools.virtual_cuda.posing.patches import Patches
from megatron_fssdp.collectives.device_clock import elapsed_s
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.layers.pass_binder import SlotPass
from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape

RANKS, NODES, SLOTS = 4, 2, 4
LINKS = LinkCost(5e-6, 1 / 200e9), LinkCost(10e-6, 1 / 50e9)
"""What plans believe: NVLink inside a node, and a network of 400 Gb/s for each GPU."""

# Layers, experts, top-k, hidden and ffn sizes, tokens of a rank, bytes of an element.
SIZES = {
    "toy": StackSize(2, 8, 2, 32, 64, 512, 4),
    "small": StackSize(2, 16, 2, 1024, 4096, 8192, 2),
    "coarse": StackSize(2, 8, 2, 4096, 14336, 4096, 2),
    "fine": StackSize(2, 64, 8, 7168, 2048, 2048, 2),
}
VARIANTS: dict[str, dict[str, Any]] = {"none": {}, "ep": {}, "fssdp": {"slots": SLOTS, "reshard_interval": 0}}
WARM_UP = 3  # loads are known from the second iteration on
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


class Turns:
    """The turns in which ranks have the card; without a lock, they compute at once."""

    def __init__(self, lock: TextIO | None) -> None:
        self._lock, self._is_mine = lock, False

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
        if not self._is_mine:
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
            self._is_mine = True

    def _give(self) -> None:
        if self._lock is not None:
            torch.cuda.current_stream().synchronize()
            self._is_mine = False
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class Layers:
    """A stack of MoE layers under one strategy."""

    def __init__(self, name: str, config: Any, profile: LayerProfile, device: torch.device) -> None:
        from megatron.core.extensions.transformer_engine import HAVE_TE
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

        from megatron_fssdp.config.strategy.strategy_registry import strategy_settings
        from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
        from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession

        use_te = HAVE_TE and device.type == "cuda"
        words = {"use_te": use_te, "num_experts": config.num_moe_experts, "moe_grouped_gemm": use_te}
        self.runtime, self.num_replicas = None, dict[int, int]()  # by layer, in the last iteration
        spec = get_moe_module_spec(**words)
        self.layers = [spec(config=config, pg_collection=None).to(device) for _ in range(config.num_layers)]
        for number, layer in enumerate(self.layers, 1):
            layer.set_layer_number(number)
        if name != "none":
            settings: Any = strategy_settings(name, {**VARIANTS[name], "nodes": NODES}, "variant")
            session = StrategySession(name, settings)
            self.runtime = session.runtime
            self.layers = [StrategyMoELayer.of(layer, session, n) for n, layer in enumerate(self.layers, 1)]
        for slot_layer in self.runtime.layers if self.runtime else ():
            slot_layer.local.set_profile(profile)
            passes = slot_layer.passes
            passes.on_pass = partial(self._note, slot_layer.local.context.layer, passes.on_pass)

    def run(
        self, hidden: torch.Tensor, upstream: torch.Tensor, routing: Sequence[Any], micro_batches: int
    ) -> torch.Tensor:
        """Run equal micro-batches and return the last output; ``routing`` has probabilities and maps."""
        runtime = self.runtime
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)
        if runtime is not None:
            runtime.begin_iteration(num_micro_batches=micro_batches)
        for _ in range(micro_batches):
            output = hidden.detach().requires_grad_()
            if runtime is not None:
                runtime.layers[0].launch(output)
            for layer, forced in zip(self.layers, routing, strict=True):
                layer.router.forward = lambda *_, forced=forced, **__: forced
                output = output + layer(torch.tanh(output))[0]
            output.backward(upstream)
        if runtime is not None:
            runtime.finish_gradients()
            runtime.end_passes()
            runtime.end_iteration()
        return output.detach()

    def _note(self, number: int, bind: Callable[[SlotPass], object], slot_pass: SlotPass) -> None:
        self.num_replicas[number] = slot_pass.plan.placement.num_replicas
        bind(slot_pass)


def main() -> int:
    """Start the ranks, or measure on one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="fine,fine*4,small,coarse", help=f"of {', '.join(SIZES)}")
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
        command = [sys.executable, *words, __file__, *sys.argv[1:]]
        return subprocess.run(command, env=environment).returncode


def measure(options: argparse.Namespace) -> None:
    """Measure all sizes on this rank. The first rank prints, and writes the results after each size."""
    on_gpu = options.device == "cuda"
    with Patches() as patches, open(os.environ["TURNS"]) as lock:
        turns = Turns(lock if on_gpu else None)
        CardGroups(poses=on_gpu, around_waits=turns.aside).install(patches)
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
            "links": [link._asdict() for link in LINKS],
            "sizes": {},
        }
        from megatron_fssdp.testing.parallel_state import megatron_parallel_state

        with megatron_parallel_state(ep=RANKS):
            for name in options.sizes.split(","):
                size, _, number = name.partition("*")
                given = SIZES[size], int(number or 1), options, turns, torch.device(options.device)
                results = measure_size(*given)
                record["sizes"][name] = results
                if dist.get_rank() == 0:
                    print("\n".join(lines(name, results)), flush=True)
                    if options.out is not None:
                        options.out.write_text(json.dumps(record, indent=1))
        dist.destroy_process_group()


def measure_size(
    size: StackSize, micro_batches: int, options: argparse.Namespace, turns: Turns, device: torch.device
) -> dict[str, Any]:
    """Return the results of all variants, which take the same iterations one after the other.

    Seconds and kernels are those of a layer and micro-batch.

    Raises:
        RuntimeError: The outputs of the variants differ.
    """
    rank, dtype = dist.get_rank(), torch.bfloat16 if device.type == "cuda" else torch.float32
    cluster = ClusterCost(*LINKS, matrix_flops_per_s(size, turns, device, dtype))
    before_s = third_of_balanced_iteration_s(size, Topology.uniform(RANKS, NODES), cluster)
    costs = size.expert_bytes, size.token_bytes, size.flops_per_token
    profile = LayerProfile(before_s, cluster, *costs, memory_capacity=SLOTS)
    config = config_of(size, dtype, on_cpu=device.type == "cpu")
    stacks = {name: Layers(name, config, profile, device) for name in VARIANTS}
    weights = [layer.state_dict() for layer in stacks["none"].layers]
    for stack in stacks.values():
        for layer, state in zip(stack.layers, weights, strict=True):
            layer.load_state_dict(
                {key: value for key, value in state.items() if value is not None}, strict=False
            )
    num_iterations = WARM_UP + options.repetitions
    shape = WorkloadShape(RANKS, size.num_experts, size.tokens_per_rank, size.top_k, num_iterations)
    counts_IDE = WORKLOADS[options.workload].counts(shape)
    measured: dict[str, list[np.ndarray]] = {name: [] for name in stacks}  # [D, 3] of each iteration
    difference = 0.0
    for iteration, counts_DE in enumerate(counts_IDE):
        rng = np.random.default_rng((iteration, rank))
        drawn = MicroBatchInput.draw(np.stack([counts_DE[rank]] * size.num_layers), size, rng)
        hidden, upstream = (part.unsqueeze(1).to(device, dtype) for part in (drawn.hidden, drawn.gradient))
        routing = [(layer.probs.to(device), layer.routing_map.to(device)) for layer in drawn.layers]
        outputs = {}
        for name, stack in stacks.items():
            with watched(device) as seen, turns.computing():
                outputs[name] = stack.run(hidden, upstream, routing, micro_batches)
            if iteration >= WARM_UP:
                measured[name].append(gathered(seen))
        scale = outputs["none"].abs().max()
        difference = max(
            difference,
            *(float((output - outputs["none"]).abs().max() / scale) for output in outputs.values()),
        )
    difference = float(gathered([difference]).max())
    if not difference <= TOLERANCES[dtype]:
        raise RuntimeError(f"outputs differ by {difference:.1e}, so the variants do not do the same work")
    most = {name: np.max(values, axis=1) for name, values in measured.items()}  # over ranks, [iterations, 3]
    passes = size.num_layers * micro_batches
    busiest = {name: values[:, 1] / passes for name, values in most.items()}
    return {
        "size": asdict(size),
        "matrix_flops_per_s": cluster.expert_flops_per_s,
        "device_max_over_mean": device_max_over_mean(counts_IDE[WARM_UP]),
        "relative_difference": difference,
        "layer": {
            name: {
                "busiest_s": quartiles(busiest[name]),
                "none_over_this": quartiles(busiest["none"] / busiest[name]),
                "kernels": int(most[name][-1, 0]) // passes,
                "replicas": sum(stacks[name].num_replicas.values()) / size.num_layers,
                "peak_bytes_above_weights": int(most[name][-1, 2]),
            }
            for name in stacks
        },
    }


def config_of(size: StackSize, dtype: torch.dtype, *, on_cpu: bool) -> Any:
    """Return Megatron's config of the layers."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        num_attention_heads=1,
        ffn_hidden_size=size.ffn_size,
        moe_ffn_hidden_size=size.ffn_size,
        num_moe_experts=size.num_experts,
        expert_model_parallel_size=RANKS,
        moe_router_topk=size.top_k,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        add_bias_linear=False,
        use_cpu_initialization=on_cpu,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )


def matrix_flops_per_s(size: StackSize, turns: Turns, device: torch.device, dtype: torch.dtype) -> float:
    """Return the throughput on an expert's rows under even loads; the same number on all ranks."""
    rows = size.tokens_per_rank * size.top_k * RANKS // size.num_experts
    shapes = (rows, size.hidden_size), (size.hidden_size, size.ffn_size)
    x, weight = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    with turns.computing():
        seconds = [elapsed_s(lambda: [x @ weight for _ in range(20)], device) / 20 for _ in range(5)]
    mine = 2 * rows * size.hidden_size * size.ffn_size / statistics.median(seconds[1:])
    return float(gathered([mine]).mean())


def gathered(values: Sequence[float]) -> np.ndarray:
    """Return the numbers of all ranks, ``[D, numbers]``."""
    of_all: list[Any] = [None] * RANKS
    dist.all_gather_object(of_all, list(values))
    return np.array(of_all, dtype=np.float64)


@contextmanager
def watched(device: torch.device) -> Iterator[list[float]]:
    """Yield a list that gets this rank's number of kernels, their seconds, and the bytes allocated at most.

    Copies are not kernels. Bytes of before, those of the weights, are not counted. On the CPU, the seconds
    are the clock's.
    """
    figures: list[float] = []
    if device.type != "cuda":
        begin_s = time.perf_counter()
        yield figures
        figures += [0, time.perf_counter() - begin_s, 0]
        return
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield figures
    cuda = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in cuda if not event.key.startswith(("Memcpy", "Memset"))]
    times_us = [kernel.self_device_time_total for kernel in kernels]
    figures += [sum(kernel.count for kernel in kernels), sum(times_us) / 1e6]
    figures.append(torch.cuda.max_memory_allocated() - before)


def lines(name: str, results: dict[str, Any]) -> list[str]:
    """Return the lines to print for one size."""

    def shown(values: Sequence[float], scale: float = 1.0) -> str:
        low, median, high = (f"{value * scale:.2f}" for value in values)
        return f"{median} ({low}-{high})"

    said = [
        f"{name}: {results['size']}; matrices at {results['matrix_flops_per_s'] / 1e12:.0f} TFLOP/s; busiest "
        f"device {results['device_max_over_mean']:.2f} × mean load; outputs differ by "
        f"{results['relative_difference']:.1e}"
    ]
    for variant, result in results["layer"].items():
        said += [
            f"  {variant}: kernels of the busiest rank, ms a layer: {shown(result['busiest_s'], 1e3)}; "
            f"none / this {shown(result['none_over_this'])}; {result['kernels']} kernels; "
            f"{result['replicas']:.1f} replicas; {result['peak_bytes_above_weights'] / 2**30:.2f} GiB more"
        ]
    return said


if __name__ == "__main__":
    sys.exit(main())
