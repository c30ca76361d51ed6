"""What the kernels of the plugin cost on one GPU: the remap, packing, additions, and copies beside attention.

    python benchmarks/gpu_kernels.py [--out FILE.json]

One process with fabricated counts stands for a source among up to 64 devices. Device microseconds are the sum
of the kernels and copies of a call, for the attention the time from its begin to its end. ``stock`` is what
Megatron does in the place of the remap: it counts the tokens of each expert. The remap includes this, for
slots, and the backward pass. ``--device virtual`` shows that the code runs; sizes are tiny, without times.

Shape letters: T tokens, D devices, E experts.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.result_file import write_result
from devtools.virtual_cuda import virtual_cuda
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slot_tables import SlotTable, even_table
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout
from megatron_fssdp.runtime.slots.remap import shares
from megatron_fssdp.runtime.slots.remap.shares import Shares

TOP_K, REPLICAS, DEVICES_PER_NODE, PARTS = 8, 2, 8, 13
SIZES = {"remap": ((4096, 8192), (128, 256), (8, 32, 64)), "expert": (2048, 7168), "heads": (32, 8192, 128)}
TINY = {"remap": ((64,), (8,), (4,)), "expert": (16, 32), "heads": (2, 16, 8)}
"""Tokens, experts and devices; sizes of an expert's matrices; heads, tokens and elements of an attention."""

Call = Callable[[], object]
Row = tuple[str, str, str, float | None, float | None, float | None]
COLUMNS = ("part", "size", "case", "device us", "host us", "GB/s of copies")


def row_of(sizes: Any, part: str, size: str, case: str, call: Call, runs: int = 5) -> Row:
    """Return the device and host microseconds of a call."""
    call()
    torch.cuda.synchronize()
    if sizes is TINY:
        return part, size, case, None, None, None
    begin_s = time.perf_counter()
    for _ in range(runs):
        call()
    host_us = (time.perf_counter() - begin_s) / runs * 1e6
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    cuda = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    device_us = sum(event.self_device_time_total for event in cuda) / runs
    return part, size, case, device_us, host_us, None


def beside(sizes: Any, call: Call, copy: Call, num_copies: int) -> list[float | None]:
    """Return the microseconds of a call beside so many copies, and those of all copies."""
    aside, moments = torch.cuda.Stream(), [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    for _ in range(2):  # The first time is slow.
        torch.cuda.synchronize()
        with torch.cuda.stream(aside):
            moments[2].record()
            for _ in range(num_copies):
                copy()
            moments[3].record()
        moments[0].record()
        call()
        moments[1].record()
    torch.cuda.synchronize()
    pairs = zip(moments[::2], moments[1::2], strict=True)
    return [None if sizes is TINY else begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def remap_rows(sizes: Any, tokens: int, experts: int, devices: int) -> Iterator[Row]:
    """Stock's work, then even shares in torch and in Triton, and exact ones in Triton."""
    size, rng = f"T {tokens:,}, E {experts}, EP {devices}", np.random.default_rng(0)
    topology = Topology.uniform(devices, max(1, devices // DEVICES_PER_NODE))
    owner_E = even_owners(experts, devices)
    present_ED = owner_E[:, None] == np.arange(devices)
    for present_E in present_ED.T:  # Each device has replicas of the most popular experts of others.
        present_E[np.flatnonzero(~present_E)[:REPLICAS]] = True
    placement = ExpertPlacement(owner_E, present_ED)
    slots = SlotTable.of(placement, int(placement.replicas_per_device_D.max()))
    popularity_E = np.sort(rng.lognormal(size=experts))[::-1]
    keys_TE = rng.random((tokens, experts)) ** (1 / popularity_E)
    map_TE = keys_TE >= np.sort(keys_TE, axis=1)[:, -min(TOP_K, experts), None]
    counts_DE = rng.multinomial(tokens * TOP_K, popularity_E / popularity_E.sum(), devices)
    counts_DE[0] = map_TE.sum(axis=0)
    routing_map, gathered = torch.from_numpy(map_TE).cuda(), torch.from_numpy(counts_DE).cuda()
    probs = torch.rand(map_TE.shape, device="cuda").requires_grad_()
    upstream = torch.rand(tokens, slots.num_slots, device="cuda")
    table = even_table(slots, placement, topology, 0)

    def both_passes(used: Shares) -> None:
        slot_map, slot_probs = used.remap(routing_map, probs)
        slot_map.sum(0)
        torch.autograd.grad(slot_probs, probs, upstream)

    yield row_of(sizes, "remap", size, "stock", lambda: routing_map.sum(0))
    if shares._kernels() is None:
        raise RuntimeError("remap: got no kernels of Triton, wanted Triton and a C compiler")
    for form, kernels in (("torch", None), ("Triton", shares._kernels())):
        with mock.patch.object(shares, "_kernels_for", lambda device, kernels=kernels: kernels):
            made = {"even": Shares.by_table(table, slots, torch.Tensor.cuda)}
            if kernels is not None:  # Otherwise, the host would be measured.
                made["exact"] = Shares.exact(
                    slots, placement, topology, 0, routing_map.device, lambda counts_E: gathered
                )
            for name, used in made.items():
                yield row_of(sizes, "remap", size, f"{name}, {form}", partial(both_passes, used))


def expert_rows(sizes: Any, ffn: int, hidden: int) -> Iterator[Row]:
    """Packing an expert against sending its tensors as they are, and adding sums in one or many parts."""
    weights = [torch.rand(shape, device="cuda").bfloat16() for shape in ((ffn, hidden), (hidden, ffn))]
    layout, size = ExpertLayout.of(weights), f"expert of 2 × {ffn} × {hidden}"
    pack = partial(torch.cat, [weight.view(-1) for weight in weights])
    yield row_of(sizes, "packing", size, "a copy of both tensors", pack)
    yield row_of(sizes, "packing", size, "direct", lambda: None)
    total, added = (torch.zeros(layout.numel, device="cuda") for _ in range(2))
    for number in (1, PARTS):
        pairs = [*zip(total.chunk(number), added.chunk(number), strict=True)]
        add = lambda pairs=pairs: [target.add_(addend) for target, addend in pairs]  # noqa: E731
        yield row_of(sizes, "addition", size, f"in {number} parts, fp32", add)


def attention_rows(sizes: Any, heads: int, tokens: int, width: int) -> Iterator[Row]:
    """An attention alone, beside copies by copy engines, and beside copies by multiprocessors."""
    size, numel = f"{heads} heads, {tokens:,} tokens", heads * tokens * width
    qkv = torch.rand((1, heads, tokens, width), device="cuda").bfloat16()
    attention = partial(scaled_dot_product_attention, qkv, qkv, qkv, is_causal=True)
    host = torch.zeros(numel, dtype=torch.float32).pin_memory()
    source, target = (torch.zeros(numel, dtype=torch.float32, device="cuda") for _ in range(2))
    alone_us, _ = beside(sizes, attention, lambda: None, 0)
    yield "attention", size, "alone", alone_us, None, None
    for case, copy in (
        ("beside copies of copy engines, from the host", lambda: target.copy_(host, non_blocking=True)),
        ("beside copies of cudaMemcpyAsync, on the card", lambda: target.copy_(source)),
        ("beside copies of a kernel, on the card", lambda: torch.neg(source, out=target)),
    ):
        _, four_us = beside(sizes, lambda: None, copy, 4)
        # Copies last about twice as long as the attention alone.
        num_copies = int(8 * alone_us / four_us) + 1 if alone_us and four_us else 1
        device_us, copies_us = beside(sizes, attention, copy, num_copies)
        speed = num_copies * source.nbytes / copies_us / 1e3 if copies_us else None
        yield "attention", size, case, device_us, None, speed


def main() -> int:
    """Measure, print a line for each case, and write all results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "virtual"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_kernels.json"))
    options = parser.parse_args()
    is_virtual = options.device == "virtual"
    sizes = TINY if is_virtual else SIZES
    with virtual_cuda() if is_virtual else nullcontext() as device:
        parts = [remap_rows(sizes, *shape) for shape in product(*sizes["remap"])]
        parts += [expert_rows(sizes, *sizes["expert"]), attention_rows(sizes, *sizes["heads"])]
        rows = []
        for row in chain.from_iterable(parts):
            rows.append(row)
            print(
                *(f"{cell:,.1f}" if isinstance(cell, float) else cell for cell in row), sep="; ", flush=True
            )
        card = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    if device is not None:
        device.assert_clean()
    write_result(options.out, f"What do the plugin's kernels cost on {card}?", COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
