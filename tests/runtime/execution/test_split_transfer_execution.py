"""Transfers in two parts give the same numbers, and the first part starts during the previous layer."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fssdp.planning.cost.transfer_split import TransferSplit
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.runtime.execution import layer_iteration
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.experts.expert_layout import ParametersByExpert
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.testing import run_ranks

from ..drawn_placements import DrawnPlacements
from ..layer_case import ACTIVATIONS, LayerCase, draw_inputs, placed
from ..rank_layer import build_layer, moe_forward
from ..reference_layer import draw_weights

WORLD, LAYERS = 4, 3
LATE = "late"
SPLITS = {
    "whole": TransferSplit(),
    "both": TransferSplit(0.4, 0.7),
    "weights": TransferSplit(gather=0.01),
    "gradients": TransferSplit(reduce=0.999),
}
CASES = (
    LayerCase("one", transfers="once", num_nodes=2),
    LayerCase("micro-batches", transfers="once", schedule="FBFB", biases=True),
    LayerCase("in flight", transfers="once", schedule="FFBB", placement="everywhere"),
    LayerCase("recomputed", transfers="once", schedule="FFBB", recompute="reentrant"),
    LayerCase("owns nothing", transfers="once", schedule="FB", owners=(0, 0, 2, 2, 2, 3, 3, 0)),
    LayerCase("re-materialized", transfers="rematerialized", schedule="FB"),
)


class SplitPlacements(DrawnPlacements):
    """A strategy of random placements whose transfers are split."""

    def __init__(self, case: LayerCase, split: TransferSplit) -> None:
        super().__init__(case)
        self.split = split
        self.seed = case.seed

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """The same random placements for every split, in whatever order the layers are planned."""
        self.rng = np.random.default_rng([self.seed, context.layer, history.num_seen])
        return replace(super().before_gate(context, history), split=self.split)


@dataclass
class Outcome:
    """Final tensors of a rank, and its transfers.

    Attributes:
        tensors: Outputs and gradients of two iterations.
        started: (layer, elements, whether a gather) of every transfer, in the order of their starts.
        bytes_moved: Bytes of both iterations by layer.
    """

    tensors: list[Tensor]
    started: list[tuple[int, int, bool]]
    bytes_moved: list[tuple[int, int]]


class LateParameters:
    """Parameters whose values arrive in the forward pass, as with Megatron's ``--overlap-param-gather``.

    Attributes:
        parameters: Parameters of one layer.
        values: Their values after the last optimizer step.
        num_awaited: How often the runtime has waited for them in this iteration.
    """

    def __init__(self, parameters: ParametersByExpert) -> None:
        self.parameters = [parameter for tensors in parameters.values() for parameter in tensors]
        self.values = [parameter.detach().clone() for parameter in self.parameters]
        self.num_awaited = 0

    def begin_iteration(self) -> None:
        """Make every early read visible in the losses."""
        self.num_awaited = 0
        for parameter in self.parameters:
            parameter.data.fill_(torch.nan)

    def arrive(self) -> None:
        """Finish the gather, once in an iteration."""
        self.num_awaited += 1
        if self.num_awaited == 1:
            for parameter, value in zip(self.parameters, self.values, strict=True):
                parameter.data.copy_(value)


def run_stack(
    rank: int, world_size: int, case: LayerCase, split: TransferSplit, *, late: bool = False
) -> Outcome:
    runtime = MoERuntime(SplitPlacements(case, split), measure=True)
    owner_E = even_owners(8, world_size) if case.owners is None else np.array(case.owners)
    weights = [draw_weights(seed, 8, 5, 6, case.activation, case.biases) for seed in range(LAYERS)]
    built = [build_layer(case, owner_E, weights[layer], runtime) for layer in range(LAYERS)]
    for number, (executor, _) in enumerate(built):
        executor.renumber(number + 1)
    gathers = [LateParameters(parameters) for _, parameters in built] if late else []
    for (executor, _), gather in zip(built, gathers, strict=False):
        executor.experts = replace(executor.experts, await_parameters=gather.arrive)
    outcome = Outcome([], [], [])
    _note_starts(outcome)
    rng = np.random.default_rng(case.seed)
    for iteration in range(2):
        runtime.begin_iteration(case.schedule.count("F"), iteration)
        for gather in gathers:
            gather.begin_iteration()
        outputs: list[Tensor] = []
        leaves: list[Tensor] = []
        for step in case.schedule:
            if step == "F":
                batch = draw_inputs(case, owner_E, world_size, rng)
                leaf = placed(batch.of_rank(batch.hidden, rank), case).requires_grad_()
                routing_map = batch.of_rank(batch.routing_map, rank).to(case.device)
                probs = batch.of_rank(batch.probs, rank).to(case.device)
                hidden = leaf
                for number, (executor, _) in enumerate(built):

                    def layer(hidden: Tensor, executor=executor, number=number, rest=(probs, routing_map)):
                        activation = ACTIVATIONS[case.activation]
                        return hidden + moe_forward(executor, hidden, *rest, activation, first=number == 0)

                    hidden = (
                        checkpoint(layer, hidden, use_reentrant=True) if case.recompute else layer(hidden)
                    )
                outputs.append(hidden)
                leaves.append(leaf)
            else:
                outputs.pop(0).square().sum().backward()
        runtime.finish_gradients()
        loads = runtime.end_iteration()
        outcome.bytes_moved += [(load.spag_bytes, load.sprs_bytes) for load in loads]
        outcome.tensors += [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]
        for _, parameters in built:
            for tensors in parameters.values():
                for parameter in tensors:
                    outcome.tensors.append(parameter.grad.clone().cpu())
                    parameter.grad = None
    return outcome


def _note_starts(outcome: Outcome) -> None:
    class Noted(layer_iteration.SparseTransfer):
        def start_all_gather(self, *args, **kwargs):
            outcome.started.append((int(self._what.split()[1]), self.num_elements, True))
            return super().start_all_gather(*args, **kwargs)

        def start_reduce_scatter(self, *args, **kwargs):
            outcome.started.append((int(self._what.split()[1]), self.num_elements, False))
            return super().start_reduce_scatter(*args, **kwargs)

    layer_iteration.SparseTransfer = Noted


def run_cases(rank: int, world_size: int) -> dict[tuple[str, str], Outcome]:
    found = {}
    original = layer_iteration.SparseTransfer
    for case in CASES:
        for name, split in SPLITS.items():
            dist.barrier()
            found[case.name, name] = run_stack(rank, world_size, case, split)
            layer_iteration.SparseTransfer = original
        dist.barrier()
        found[case.name, LATE] = run_stack(rank, world_size, case, SPLITS["both"], late=True)
        layer_iteration.SparseTransfer = original
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[tuple[str, str], Outcome]]:
    return run_ranks(run_cases, WORLD, timeout_s=120)


@pytest.mark.parametrize("split", [*(name for name in SPLITS if name != "whole"), LATE])
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_splitting_transfers_changes_no_bit(
    outcomes: list[dict[tuple[str, str], Outcome]], case: str, split: str
) -> None:
    """``late`` is ``both`` with Parameters that hold NaN until the runtime waits for them."""
    for of_rank in outcomes:
        whole, parts = of_rank[case, "whole"], of_rank[case, split]
        assert len(whole.tensors) == len(parts.tensors) > 0
        for wanted, got in zip(whole.tensors, parts.tensors, strict=True):
            assert torch.equal(wanted, got)


@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_parts_start_in_their_layers(
    outcomes: list[dict[tuple[str, str], Outcome]], case: str, split: str
) -> None:
    whole, found = outcomes[0][case, "whole"], outcomes[0][case, split]
    assert found.bytes_moved == whole.bytes_moved
    assert sum(gathered for gathered, _ in found.bytes_moved) > 0
    numel = max(elements for _, elements, _ in found.started)
    per_iteration = len(found.started) // 2
    gathers = [entry for entry in found.started[:per_iteration] if entry[2]]
    reductions = [entry for entry in found.started[:per_iteration] if not entry[2]]
    if case == "re-materialized" or split == "whole":
        assert all(elements == numel for _, elements, _ in found.started)
        return
    shares = SPLITS[split]
    early, late = round(shares.gather * numel), min(round(shares.reduce * numel), numel - 1)
    # The first layer has no layer before it; for the others a part starts before the layer begins.
    wanted_gathers = [(1, numel)]
    for layer in range(2, LAYERS + 1):
        wanted_gathers += [(layer, early), (layer, numel - early)] if early else [(layer, numel)]
    assert [(layer, elements) for layer, elements, _ in gathers] == wanted_gathers
    wanted: list[tuple[int, int]] = []
    for layer in range(LAYERS, 0, -1):
        # The rest starts in the backward pass of the experts below, before that layer's own gradients.
        wanted += [(layer + 1, late)] if late and layer < LAYERS else []
        wanted += [(layer, numel - late)] if late and layer > 1 else [(layer, numel)]
    assert [(layer, elements) for layer, elements, _ in reductions] == wanted
