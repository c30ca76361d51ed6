"""Compares this plugin's MoE layer with Megatron's own layers on one device, with the same work in one run.

On one device there are no replicas. The benchmark times the plugin's dispatch and experts under the
strategy ``ep``. All forms have the same router, tokens and gradients, and take turns in random order. Ratios
compare measurements of the same turn. On a CPU the layer has toy size, which only shows that the code runs.

    python benchmarks/gpu_layer.py [--size NAME] [--repetitions N] [--out FILE.json]

Host overhead is the host's time for planning and for preparing the dispatch, while the device is idle. Host
synchronizations are the host's waits for a stream or an event, which torch's profiler sees (CUDA only).

``--virtual`` runs the CUDA code on a virtual device (``tests.support.virtual_cuda``). Times then
mean nothing and are left out. The device counts synchronizations, and races and other faults end the run with
exit code 3.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

OURS, SEQUENTIAL, TE_GROUPED = "ours", "SequentialMLP", "TEGroupedMLP"
_WARM_UP = 3
EXIT_FINDINGS = 3


@dataclass(frozen=True)
class LayerSize:
    """Sizes of the layer. Its data type is bf16 on CUDA and fp32 on the CPU."""

    num_tokens: int
    hidden_size: int
    ffn_size: int
    num_experts: int
    top_k: int


SIZES = {
    "toy": LayerSize(64, 32, 64, 4, 2),
    "fine": LayerSize(8192, 2048, 1408, 64, 6),
    "coarse": LayerSize(4096, 4096, 14336, 8, 2),
}


def main() -> None:
    """Measure on the device that the options name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, help="default: coarse and fine on CUDA, toy on the CPU")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is a CUDA device")
    parser.add_argument("--virtual", action="store_true", help="use a virtual CUDA device")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.repetitions < 2:
        parser.error(
            f"--repetitions {options.repetitions}: wanted 2 or more, because the result includes quartiles"
        )
    if options.virtual:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.support.virtual_cuda import virtual_cuda
    with virtual_cuda() if options.virtual else nullcontext() as virtual:
        measure_all(options, virtual)
    for finding in virtual.findings if virtual is not None else ():
        print(finding, file=sys.stderr)
    if virtual is not None and virtual.findings:
        sys.exit(EXIT_FINDINGS)


def measure_all(options: argparse.Namespace, virtual: Any) -> None:
    """Measure all sizes and print the results. With ``--out``, also write them as JSON."""
    on_gpu = start(options.cpu)
    default = ["coarse", "fine"] if on_gpu and virtual is None else ["toy"]
    names = [options.size] if options.size else default
    records = [measure(name, on_gpu, options.repetitions, virtual) for name in names]
    if virtual is not None:
        records = [without_times(record) for record in records]
    for name, record in zip(names, records, strict=True):
        print("\n".join(lines(name, record)))
    if options.out is not None:
        facts = {"date": str(date.today()), "device": device_name(on_gpu)}
        options.out.write_text(
            json.dumps({**facts, "sizes": dict(zip(names, records, strict=True))}, indent=1)
        )
        print(f"wrote {options.out}")


def start(on_cpu: bool) -> bool:
    """Start a process group of one rank, with Megatron's CPU runtime if needed.

    Return whether it uses CUDA.
    """
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available() and not on_cpu
    if not on_gpu:
        os.environ["MEGATRON_FSSDP_DEVICE"] = "cpu"
        from megatron_fssdp.megatron_adapter.cpu import cpu_runtime

        cpu_runtime.install()
    else:
        torch.cuda.set_device(0)
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    return on_gpu


def device_name(on_gpu: bool) -> str:
    """Return the name of the device and the version of torch."""
    import torch

    name = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU"
    return f"{name}, torch {torch.__version__}"


def measure(name: str, on_gpu: bool, repetitions: int, virtual: Any = None) -> dict[str, Any]:
    """Measure one size and return all results as plain data.

    Raises:
        RuntimeError: The outputs of the forms differ.
    """
    import torch

    from megatron_fssdp.testing.parallel_state import megatron_parallel_state

    size, device = SIZES[name], torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with megatron_parallel_state():
        layers = build_layers(size, device, dtype, is_virtual=virtual is not None)
        generator = torch.Generator().manual_seed(3)
        hidden, upstream = (
            torch.randn(size.num_tokens, 1, size.hidden_size, generator=generator).to(device, dtype)
            for _ in range(2)
        )
        results = {name: both_passes(layer, hidden, upstream) for name, layer in layers.items()}
        difference = float(
            (results[OURS] - results[SEQUENTIAL]).abs().max() / results[SEQUENTIAL].abs().max()
        )
        if difference > (5e-2 if on_gpu else 1e-4):
            raise RuntimeError(f"outputs differ by {difference:.1e}, so the forms do not do the same work")
        calls = {name: (lambda x=layer: both_passes(x, hidden, upstream)) for name, layer in layers.items()}
        seconds = take_turns(calls, device, repetitions)
        return {
            "size": asdict(size),
            "relative_difference": difference,
            "seconds": {name: quartiles(times) for name, times in seconds.items()},
            "megatron_over_ours": {
                name: quartiles([a / b for a, b in zip(times, seconds[OURS], strict=True)])
                for name, times in seconds.items()
                if name != OURS
            },
            "host_overhead_s": host_overhead(layers[OURS], calls[OURS], device, repetitions),
            "host_synchronizations": {
                name: count_synchronizations(call, virtual) if on_gpu else None
                for name, call in calls.items()
            },
        }


def build_layers(size: LayerSize, device: Any, dtype: Any, *, is_virtual: bool = False) -> dict[str, Any]:
    """Return the forms of the layer by name.

    They have the same router and, if shapes agree, the same experts. A virtual device has no random generator
    of its own, so weights are drawn on the CPU there.
    """
    import torch
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_fssdp

    config = TransformerConfig(
        num_layers=1,
        hidden_size=size.hidden_size,
        num_attention_heads=1,
        ffn_hidden_size=size.ffn_size,
        moe_ffn_hidden_size=size.ffn_size,
        num_moe_experts=size.num_experts,
        moe_router_topk=size.top_k,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=device.type == "cpu" or is_virtual,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    specs = {
        SEQUENTIAL: get_moe_module_spec(use_te=False, num_experts=size.num_experts),
        OURS: megatron_fssdp.get_moe_module_spec(
            use_te=False, num_experts=size.num_experts, strategy="ep", settings={}
        ),
    }
    if HAVE_TE and device.type == "cuda":
        specs[TE_GROUPED] = get_moe_module_spec(
            use_te=True, num_experts=size.num_experts, moe_grouped_gemm=True
        )
    layers = {}
    for name, spec in specs.items():
        layer = spec(config=config, pg_collection=None).to(device)
        layer.set_layer_number(1)
        layers[name] = layer
    stock = {key: value for key, value in layers[SEQUENTIAL].state_dict().items() if value is not None}
    layers[OURS].load_state_dict(stock, strict=False)
    if TE_GROUPED in layers:
        layers[TE_GROUPED].router.load_state_dict(layers[SEQUENTIAL].router.state_dict())
    return layers


def both_passes(layer: Any, hidden: Any, upstream: Any) -> Any:
    """Run forward and backward passes with new gradients, and return the output."""
    layer.zero_grad(set_to_none=True)
    leaf = hidden.detach().requires_grad_()
    output = layer(leaf)[0]
    output.backward(upstream)
    return output.detach()


def take_turns(calls: dict[str, Callable[[], Any]], device: Any, repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of each call in each round. Every round has a new random order."""
    from megatron_fssdp.collectives.device_clock import elapsed_s

    order, seconds = random.Random(0), {name: [] for name in calls}
    for number in range(_WARM_UP + repetitions):
        for name in order.sample(list(calls), len(calls)):
            taken_s = elapsed_s(calls[name], device)
            if number >= _WARM_UP:
                seconds[name].append(taken_s)
    return seconds


def host_overhead(layer: Any, call: Callable[[], Any], device: Any, repetitions: int) -> list[float]:
    """Return quartiles of the host seconds for planning and preparing the dispatch of one layer."""
    from megatron_fssdp.collectives.device_clock import synchronize

    slot_layer, spent_s, totals = layer.slot_layer, [0.0], []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            synchronize(device)
            started_s = time.perf_counter()
            result = function(*args, **kwargs)
            spent_s[0] += time.perf_counter() - started_s
            return result

        return run

    prepare, remap = slot_layer.prepare, slot_layer.remap
    slot_layer.prepare, slot_layer.remap = timed(prepare), timed(remap)
    try:
        for number in range(_WARM_UP + repetitions):
            spent_s[0] = 0.0
            call()
            if number >= _WARM_UP:
                totals.append(spent_s[0])
    finally:
        slot_layer.prepare, slot_layer.remap = prepare, remap
    return quartiles(totals)


def count_synchronizations(call: Callable[[], Any], virtual: Any) -> int:
    """Return how often the host waits for the device in both passes."""
    import torch

    if virtual is not None:
        before = len(virtual.host_syncs)
        call()
        return len(virtual.host_syncs) - before
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
    # The profiler itself waits once at its end.
    waits = ("cudaStreamSynchronize", "cudaEventSynchronize")
    return sum(one.count for one in profile.key_averages() if one.key in waits)


def quartiles(values: list[float]) -> list[float]:
    """25th, 50th and 75th percentile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Return the results that do not depend on time, because times of a virtual device mean nothing."""
    kept = ("size", "relative_difference", "host_synchronizations")
    return {"virtual": "no times", **{key: record[key] for key in kept}}


def lines(name: str, record: dict[str, Any]) -> list[str]:
    """Return the lines to print for one size."""

    def shown(values: list[float], scale: float = 1.0, digits: int = 2) -> str:
        low, median, high = (f"{value * scale:.{digits}f}" for value in values)
        return f"{median} ({low}-{high})"

    found = [f"{name}: {record['size']}; {record.get('virtual', 'medians (quartiles)')}"]
    found += [f"  {form}: {shown(times, 1e3)} ms" for form, times in record.get("seconds", {}).items()]
    found += [
        f"  {form} / ours: {shown(ratios)} (above 1: ours is faster)"
        for form, ratios in record.get("megatron_over_ours", {}).items()
    ]
    if "host_overhead_s" in record:
        host = shown(record["host_overhead_s"], 1e6, 0)
        found.append(f"  host time for planning and preparing the dispatch: {host} us per layer")
    counts = [
        f"{form} {'not counted' if count is None else count}"
        for form, count in record["host_synchronizations"].items()
    ]
    found.append(f"  largest relative difference of the outputs: {record['relative_difference']:.1e}")
    found.append(f"  host synchronizations, both passes: {', '.join(counts)}")
    return found


if __name__ == "__main__":
    main()
