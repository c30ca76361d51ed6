"""The remap in Triton has the bits of the remap in torch. Without a GPU, Triton interprets its kernels."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import Phase, given

from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slot_tables import SlotTable, even_table
from megatron_fssdp.runtime.slots.remap import shares
from megatron_fssdp.runtime.slots.remap.shares import Shares, seconds_of_shares
from tests.drawn_examples import SEEDS, examples
from tests.planning.placement_cases import random_counts_DE
from tests.support.python_process import python_output

from .exact_reference import ENOUGH, exact_sent_ED
from .test_reference import drawn_routing

pytest.importorskip("devtools.virtual_cuda.posing.triton_kernels")  # which makes Triton's interpreter faster
kernels = pytest.importorskip("megatron_fssdp.runtime.slots.remap.kernels")
interval_kernel = pytest.importorskip("megatron_fssdp.runtime.slots.remap.interval_kernel")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def drawn_layer(rng):
    """Nodes of several sizes, with devices that have between none and all of the others' experts."""
    sizes = rng.integers(1, 4, rng.integers(1, 4))
    topology = Topology(tuple(np.repeat(range(len(sizes)), sizes)))
    devices = topology.num_devices
    experts = devices * int(rng.choice([1, 3, 5]))
    owner_E = even_owners(experts, devices)
    present_ED = rng.random((experts, devices)) < rng.choice([0.0, 0.1, 0.4, 1.0])
    present_ED[np.arange(experts), owner_E] = True
    return topology, ExpertPlacement(owner_E, present_ED)


def both(of_torch, of_triton, routing_map, probs, upstream):
    """Map, probabilities and their gradients, in torch and in Triton."""
    results = []
    for use, make in ((None, of_torch), (kernels, of_triton)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shares, "_kernels_for", lambda device, use=use: use)
            weights = probs.clone().requires_grad_()
            counts_W = torch.ones(upstream.shape[1], dtype=torch.int32, device=DEVICE)
            slot_map, slot_probs = make().remap(routing_map, weights, counts_W)
            (slot_probs * upstream).sum().backward()
        results.append((slot_map, slot_probs, weights.grad, counts_W))
    return zip(*results, strict=True)


@examples(10, phases=[Phase.generate])  # Shrinking would take minutes.
@given(SEEDS)
def test_map_probabilities_and_gradients_have_the_same_bits(seed):
    """Few elements of a matrix mean several blocks of experts, each with a program of its own."""
    rng = np.random.default_rng(seed)
    topology, placement = drawn_layer(rng)
    num_tokens, scale = int(rng.choice([0, 1, 64, 65, 130])), int(rng.choice([3, 300]))
    slots = SlotTable.of(placement, int(placement.replicas_per_device_D.max()), multiple=2)
    source = int(rng.integers(topology.num_devices))
    routing_map, probs = drawn_routing(rng, num_tokens, placement.num_experts)
    counts_DE = (
        random_counts_DE(int(rng.integers(2**32)), topology.num_devices, placement.num_experts) * scale
    )
    if rng.random() < 0.5:
        counts_DE[source] = routing_map.sum(0).numpy()
    upstream = torch.tensor(rng.random((num_tokens, slots.num_slots)), dtype=torch.float32, device=DEVICE)
    here = routing_map.to(DEVICE), probs.to(DEVICE), upstream

    table = Shares.by_table(even_table(slots, placement, topology, source), slots, lambda of: of.to(DEVICE))
    sent_ED = placement.present_ED * rng.integers(0, 30, placement.present_ED.shape)
    known = Shares.by_intervals(sent_ED, slots, DEVICE)
    # Compiled kernels keep their constants, so only the interpreted ones often share evenly.
    enough = ENOUGH if torch.cuda.is_available() else rng.choice([ENOUGH, 1e9])
    wanted_ED = exact_sent_ED(counts_DE, placement, topology, source, enough)
    wanted, counts = Shares.by_intervals(wanted_ED, slots, DEVICE), torch.tensor(counts_DE, device=DEVICE)
    exact = slots, placement, topology, source, DEVICE, lambda counts_E: counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interval_kernel, "_ELEMENTS", int(rng.choice([1024, 32])))
        if enough > ENOUGH:
            patch.setattr(interval_kernel, "_ENOUGH", enough)
        for of_torch, of_triton in (
            (lambda: table, lambda: table),
            (lambda: known, lambda: known),
            (lambda: wanted, lambda: Shares.exact(*exact)),
        ):
            for in_torch, in_triton in both(of_torch, of_triton, *here):
                assert in_torch.dtype == in_triton.dtype
                assert torch.equal(in_torch, in_triton)


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current device, whatever tensors it gets."""
    devices = []
    begin = lambda tensor: nullcontext(devices.append(tensor.device))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_of", begin)
    monkeypatch.setattr(shares, "_kernels_for", lambda device: kernels)
    counts_DE = torch.ones(2, 2, dtype=torch.int64, device=DEVICE)
    whole = ExpertPlacement(np.zeros(2, int), np.ones((2, 2), bool))
    slots, where = SlotTable(np.tile(np.arange(2), (2, 1))), (Topology((0, 0)), 0, DEVICE)
    Shares.exact(slots, whole, *where, lambda counts_E: counts_DE).remap(counts_DE.bool(), counts_DE.float())
    seconds_of_shares(2, Topology((0, 0)), DEVICE)
    assert devices == [counts_DE.device] * 2


def test_without_a_compiler_torch_computes_and_one_line_says_so(monkeypatch, caplog):
    def fail(*given, **options):
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    monkeypatch.setattr(torch, "zeros", fail)  # the first that is needed on the device
    shares._kernels.cache_clear()
    assert shares._kernels() is None
    assert shares._kernels() is None
    shares._kernels.cache_clear()
    (line,) = caplog.messages
    assert "C compiler" in line
    assert "\n" not in line


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_fssdp.runtime.slots.remap import interval_kernel, kernels

def compile(kernel, arch, num_warps, constants, **pointers):
    types = {name: "*i64" if name.split("_")[-1].isupper() else "i32" for name in kernel.arg_names}
    types |= {name: kind for name, kind in pointers.items() if name in types}
    types |= dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # Triton tells the compiler that 16 divides most addresses, and 128 or 256 experts.
    is_whole = [types[name][0] == "*" or name == "num_experts" for name in kernel.arg_names]
    attributes = {(at,): [["tt.divisibility", 16]] for at, whole in enumerate(is_whole) if whole}
    source = ASTSource(kernel, types, constexprs=places, attrs=attributes)
    options = {"enable_fp_fusion": False, "num_warps": num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    print(kernel.__name__, arch, len(compiled.asm["cubin"]) > 0)

BYTES = {"map_TE": "*u8", "out_map_TW": "*u8", "out_slot_TE": "*i32", "slot_TE": "*i32"}
BYTES["out_counts_W"] = "*i32"
for arch in (80, 90, 100):
    compile(kernels._count_tokens, arch, 4, {}, **BYTES)
    for probs, known, constants in (
        ("*fp32", "*i64", {"num_rows": 64}),
        ("*bf16", "*i32", {"num_rows": 0, "out_counts_W": None}),
    ):
        types = {"probs_TE": probs, "out_probs_TW": probs, "known": known}
        compile(kernels._route, arch, 4, constants, **BYTES, **types)
    compile(kernels._return_entries, arch, 4, {}, **BYTES, of_TW="*fp32", out_of_TE="*fp32")
    for places, per_node, block in ((8, 8, 128), (64, 8, 16), (256, 8, 4)):
        sizes = {"PLACES": places, "PER_NODE": per_node, "BLOCK": block}
        types = {"out_kept": "*fp64", "kept": "*fp64", "device_NG": "*i64", "out_interval_W2": "*i32"}
        compile(interval_kernel._find_priors, arch, 8, sizes, **types)
        compile(interval_kernel._find_intervals, arch, 8, {**sizes, "ROUND_BLOCK": 4 * block}, **types)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here():
    assert python_output("-c", COMPILE, TRITON_INTERPRET="0").count("True") == 3 * 10
