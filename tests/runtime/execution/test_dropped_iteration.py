"""An iteration that is dropped awaits the transfers that still use its memory."""

from dataclasses import replace

import numpy as np
import torch

from megatron_fssdp.collectives.transfer_lane import ThreadTransfer
from megatron_fssdp.planning.cost.transfer_split import TransferSplit
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.testing import run_ranks

from ..drawn_placements import DrawnPlacements
from ..layer_case import ACTIVATIONS, LayerCase, draw_inputs
from ..rank_layer import build_layer, moe_forward
from ..reference_layer import draw_weights

CASE = LayerCase("dropped iteration", placement="everywhere", transfers="once")


class SplitPlacements(DrawnPlacements):
    """A strategy whose transfers are split."""

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        return replace(super().before_gate(context, history), split=TransferSplit(gather=0.4))


def drop(rank: int, world_size: int) -> list[int]:
    """Transfers that were awaited by each way to end an iteration early."""
    owner_E = even_owners(CASE.num_experts, world_size)
    weights = draw_weights(CASE.seed, CASE.num_experts, 5, 6, CASE.activation, CASE.biases)
    awaited: list[int] = []
    original = ThreadTransfer.wait

    def counting(transfer: ThreadTransfer) -> dict[int, torch.Tensor]:
        awaited[-1] += 1
        return original(transfer)

    for how in ("own", "drop", "drop a whole gather"):
        runtime = MoERuntime(SplitPlacements(CASE))
        layers = [build_layer(CASE, owner_E, weights, runtime)[0] for _ in range(2)]
        runtime.begin_iteration(1)
        batch = draw_inputs(CASE, owner_E, world_size, np.random.default_rng(0))
        inputs = [batch.of_rank(tensor, rank) for tensor in (batch.hidden, batch.probs, batch.routing_map)]
        if how == "drop a whole gather":
            layers[0].launch(inputs[0], first=True)
        else:
            # The experts of the first layer start the first part of the second layer's gather.
            moe_forward(layers[0], *inputs, ACTIVATIONS[CASE.activation])
        awaited.append(0)
        ThreadTransfer.wait = counting  # type: ignore[method-assign]
        if how == "own":
            experts = layers[1].experts
            layers[1].own(owner_E, experts.parameters, experts.layout())
        else:
            runtime.repeat_iteration()
        ThreadTransfer.wait = original  # type: ignore[method-assign]
    return awaited


def test_transfers_of_a_dropped_iteration_are_awaited() -> None:
    assert run_ranks(drop, 2, timeout_s=60) == [[1, 1, 1]] * 2
