"""The forward pass on fake CUDA tensors: shapes, strides and devices that the CUDA operators accept.

Fake tensors have no data, so this net is cheap at sizes of real models. It sees what virtual devices cannot:
the devices that torch itself derives, and the alignment that ``grouped_mm`` asks for on CUDA. The backward
pass is left out, because autograd asks the CUDA driver for a stream, and there is no driver here. Virtual
devices run the backward pass: see ``test_virtual_devices.py``.
"""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_fssdp.collectives.rows.gathered_counts import CountsOnTheWay
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.layer_pass import run_layer
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fssdp.megatron_adapter.cpu.cpu_device import FinishedStream, HostEvent
from megatron_fssdp.planning.placement.group_ring import GroupRing
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.experts.grouped_ffn import grouped_ffn
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.testing import run_ranks

from ..drawn_placements import DrawnPlacements
from ..layer_case import ACTIVATIONS, LayerCase

DEVICES, RANK, EXPERTS, TOKENS, TOP_K = 8, 1, 16, 256, 2
MODEL_DIM, FFN_DIM = 2048, 1408


class Noted(TorchDispatchMode):
    """Notes the devices and shapes of ``grouped_mm``'s matrices.

    Attributes:
        products: Device type and shapes of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" in str(func):
            self.products.append((args[0].device.type, [tuple(x.shape) for x in args[:2]]))
        return func(*args, **(kwargs or {}))


class DrawnCounts:
    """Replaces the copy of the gathered counts on the host: fake tensors have no routing to count."""

    def numpy(self) -> np.ndarray:
        """Counts of all devices, int64 ``[1, D, E]``."""
        rng = np.random.default_rng(0)
        return rng.multinomial(TOKENS * TOP_K, np.full(EXPERTS, 1 / EXPERTS), size=DEVICES)[None]


@contextlib.contextmanager
def fake_devices() -> Any:
    """Fake tensors may be on ``cuda``; streams have no effect, and messages go nowhere."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=DEVICES)
    streams = {
        "Stream": FinishedStream,
        "Event": HostEvent,
        "current_stream": lambda device=None: FinishedStream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "get_device_capability": lambda device=None: (9, 0),
    }
    with (
        mock.patch.multiple(torch.cuda, **streams),
        mock.patch.object(Tensor, "record_stream"),
        mock.patch.object(CountsOnTheWay, "wait", return_value=[DrawnCounts()]),
        FakeTensorMode(),
    ):
        yield
    dist.destroy_process_group()


def run_fake(
    rank: int, world_size: int, cases: Sequence[tuple[str, int | None]]
) -> list[tuple[str, tuple[int, ...], list[tuple[str, list[tuple[int, ...]]]]]]:
    """Device type and shape of a layer's output, and the grouped products, for each case."""
    found = []
    with fake_devices():
        for transfers, group_size in cases:
            with Noted() as noted:
                output = forward(transfers, group_size)
            found.append((output.device.type, tuple(output.shape), noted.products))
    return found


def forward(transfers: str, group_size: int | None) -> Tensor:
    """The forward pass of a layer on fake tensors."""
    factory: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    owner_E, topology = even_owners(EXPERTS, DEVICES), Topology.uniform(DEVICES, 2)
    parameters = {
        int(e): [
            torch.nn.Parameter(torch.empty(2 * FFN_DIM, MODEL_DIM, **factory)),
            torch.nn.Parameter(torch.empty(MODEL_DIM, FFN_DIM, **factory)),
        ]
        for e in np.flatnonzero(owner_E == RANK)
    }
    ring = None if group_size is None else GroupRing(RANK, DEVICES, group_size)
    groups = ExpertGroups(dist.group.WORLD, topology, dist.new_group(), ring=ring)
    runtime = MoERuntime(DrawnPlacements(LayerCase("fake", transfers=transfers)))
    executor = runtime.add_layer(LayerContext(1, owner_E, topology), groups, parameters)
    runtime.begin_iteration(1)
    hidden = executor.launch(torch.randn(TOKENS, MODEL_DIM, **factory), first=True)
    probs = torch.rand(TOKENS, EXPERTS, device="cuda")
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool, device="cuda")
    compute = partial(grouped_ffn, activation=ACTIVATIONS["swiglu"])
    output, _ = run_layer(executor, hidden, probs, routing_map, compute)
    return output


def test_shapes_strides_and_devices_fit() -> None:
    cases = [(transfers, None) for transfers in ("once", "rematerialized", "each")] + [("once", 2)]
    (found,) = run_ranks(run_fake, 1, cases)
    assert len(found) == len(cases)
    for device, shape, products in found:
        assert (device, shape) == ("cuda", (TOKENS, MODEL_DIM))
        assert products
        assert {product_device for product_device, _ in products} == {"cuda"}


def refuse(rank: int, world_size: int) -> None:
    with fake_devices():
        with pytest.raises(RuntimeError, match="16"):
            functional.grouped_mm(
                torch.randn(8, 12, dtype=torch.bfloat16, device="cuda"),
                torch.randn(2, 12, 16, dtype=torch.bfloat16, device="cuda"),
                offs=torch.tensor([4, 8], dtype=torch.int32, device="cuda"),
            )
        with pytest.raises(RuntimeError, match="device"):
            torch.randn(3, device="cuda") + torch.randn(3)


def test_fake_tensors_refuse_wrong_alignment_and_devices() -> None:
    run_ranks(refuse, 1)
