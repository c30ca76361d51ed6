"""How many batches of messages and how many kernels 12 replicas add to a layer, counted on virtual devices.

Experts compute as Transformer Engine's grouped ones: one kernel for each expert and matrix product.
"""

import itertools
from collections import Counter
from unittest import mock

import torch
from torch.nn import functional

from devtools.virtual_cuda import EventKind
from megatron_fssdp.testing import run_ranks
from tests.support.training_preload import VIRTUAL_PRELOAD

from .. import rank_layer
from ..case_run import CaseRun
from ..layer_case import LayerCase
from .test_virtual_devices import virtual_rank

RANKS, LAYERS, REPLICAS = 4, 2, 12
KERNELS = (EventKind.OPERATOR, EventKind.COLLECTIVE, EventKind.P2P_BATCH)
PRODUCTS = 3 * 2  # of an expert's two matrices in both passes


class GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, rows_U, *weights):
        ctx.rows_U = rows_U
        ctx.save_for_backward(rows, *weights)
        output = rows.new_empty(len(rows), len(weights[0]))
        parts = zip(output.split(rows_U), rows.split(rows_U), weights, strict=True)
        for out, x, weight in parts:
            torch.mm(x, weight.t(), out=out)
        return output

    @staticmethod
    def backward(ctx, gradient):
        rows, *weights = ctx.saved_tensors
        of_rows = torch.empty_like(rows)
        tensors = (of_rows, gradient, rows)
        parts = zip(*(x.split(ctx.rows_U) for x in tensors), weights, strict=True)
        return of_rows, None, *(_products(*part) for part in parts)


def _products(of_x, gradient, x, weight):
    torch.mm(gradient, weight, out=of_x)
    return gradient.t() @ x


def grouped_experts(rows, rows_U, row_probs, parameters_U):
    used = [slot for slot, parameters in enumerate(parameters_U) if parameters is not None]
    fc1_U, fc2_U = zip(*(parameters_U[slot] for slot in used), strict=True)
    rows_of_used = [rows_U[slot] for slot in used]
    hidden = functional.gelu(GroupedProduct.apply(rows, rows_of_used, *fc1_U))
    output = GroupedProduct.apply(hidden, rows_of_used, *fc2_U)
    return (output * row_probs.unsqueeze(1)).to(output.dtype)


def count(rank, world_size):
    """Operations of the passes of the second iteration, by placement: forward and backward passes."""
    counts = {}
    for placement in ("owners", "everywhere"):
        case = LayerCase(
            f"counted-{placement}",
            placement=placement,
            num_layers=LAYERS,
            num_experts=16,
            num_nodes=1,
            tokens=(48,) * world_size,
            device="cuda",
            dtype=torch.bfloat16,
            has_main_grad=True,
        )
        with virtual_rank(case) as device, mock.patch.object(rank_layer, "_experts", grouped_experts):
            run = CaseRun(case, measure=False, check_plans=False)
            for iteration in range(2):
                batch = run.draw()
                run.runtime.begin_iteration(1, iteration)
                places = [len(device.events)]
                output, *_ = run.forward(batch)
                places.append(len(device.events))
                output.sum().backward()
                run.runtime.finish_gradients()
                places.append(len(device.events))
                run.end()
            counts[placement] = [
                Counter(
                    "batch" if event.kind is EventKind.P2P_BATCH else event.name
                    for event in device.events[begin:end]
                    if event.kind in KERNELS
                )
                for begin, end in itertools.pairwise(places)
            ]
            torch.cuda.synchronize()
    return counts


def test_12_replicas_add_few_batches_and_kernels_to_a_layer():
    for of_placement in run_ranks(count, RANKS, preload=VIRTUAL_PRELOAD):
        owners, everywhere = of_placement["owners"], of_placement["everywhere"]
        assert [counter["batch"] for counter in owners] == [0, 0]
        assert all(0 < counter["batch"] <= 3 * LAYERS for counter in everywhere)
        more = sum(everywhere, Counter()) - sum(owners, Counter())
        # Products of experts without rows are no kernels, so all of them are counted by hand.
        more["mm"] = LAYERS * PRODUCTS * REPLICAS
        print(more.total(), more)
        assert more.total() <= LAYERS * 98, more
