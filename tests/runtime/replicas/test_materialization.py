"""Replicas that are kept or released between passes give the same numbers with different memory."""

import gc
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fssdp.planning.memory.held_replicas import HeldReplicas, ReplicaLife
from megatron_fssdp.planning.memory.memory_accounting import ExpertMemory, ExpertOptimizer, expert_memory
from megatron_fssdp.planning.memory.pipeline_stage import PipelineStage
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.message_size import HOST_MESSAGES
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.replicas.materialization import Materialization
from megatron_fssdp.runtime.replicas.replica_weights import ReplicaWeights, WeightState
from megatron_fssdp.testing import run_ranks

from ..drawn_placements import DrawnPlacements
from ..layer_case import ACTIVATIONS, LayerCase, draw_inputs
from ..rank_layer import build_layer, compare_with_reference, moe_forward
from ..reference_layer import draw_weights

NOBODY = (0, 0, 2, 2, 2, 3, 3, 0)  # rank 1 owns nothing

LIVES = {
    "once": ReplicaLife.ITERATION,
    "rematerialized": ReplicaLife.LAYER_PASS,
    "each": ReplicaLife.MICRO_BATCH,
}
CASES = (
    [
        case
        for mode in LIVES
        for case in [
            LayerCase(f"{mode}-plain", transfers=mode, num_iterations=3),
            LayerCase(f"{mode}-micro-batches", transfers=mode, schedule="FBFBFB", biases=True, num_nodes=2),
            LayerCase(f"{mode}-pipeline", transfers=mode, schedule="FFFBFBBFBB", num_nodes=2),
            LayerCase(f"{mode}-everywhere", transfers=mode, placement="everywhere", schedule="FFBB"),
            LayerCase(f"{mode}-owners", transfers=mode, placement="owners", schedule="FFBB"),
            LayerCase(f"{mode}-fssdp", transfers=mode, placement="fssdp", num_iterations=4, schedule="FFBB"),
            LayerCase(f"{mode}-reentrant", transfers=mode, recompute="reentrant", schedule="FFBB"),
            LayerCase(f"{mode}-kept-exchange", transfers=mode, recompute="kept", schedule="FFBB"),
            LayerCase(f"{mode}-non-reentrant", transfers=mode, recompute="non_reentrant", schedule="FFBB"),
            LayerCase(f"{mode}-calibrated", transfers=mode, calibrated=True, schedule="FBFB", num_nodes=2),
            LayerCase(
                f"{mode}-calibrated-recomputed",
                transfers=mode,
                calibrated=True,
                recompute="reentrant",
                schedule="FFBB",
            ),
            LayerCase(f"{mode}-owns-nothing", transfers=mode, owners=NOBODY, schedule="FFBB"),
            LayerCase(f"{mode}-replicas-only", transfers=mode, owners=NOBODY, placement="replicas_only"),
            LayerCase(f"{mode}-holds-nothing", transfers=mode, owners=NOBODY, placement="nowhere_else"),
            LayerCase(f"{mode}-dropped", transfers=mode, routing="dropped", schedule="FFBB"),
            LayerCase(f"{mode}-no-tokens", transfers=mode, tokens=(0, 0, 0, 0), schedule="FBFB"),
            LayerCase(f"{mode}-without-input-gradients", transfers=mode, inputs=(), schedule="FFBB"),
            LayerCase(f"{mode}-fp32", transfers=mode, dtype=torch.float32, schedule="FFBB"),
            LayerCase(f"{mode}-bf16", transfers=mode, dtype=torch.bfloat16, schedule="FFBB"),
        ]
    ]
    + [
        LayerCase(
            f"{name}-{mode}-{recompute}", placement=name, transfers=mode, recompute=recompute, schedule="FFBB"
        )
        for name in ("fastermoe", "prophet", "quota")
        for mode, recompute in (
            ("once", None),
            ("in_turn", None),
            ("once", "reentrant"),
            ("once", "kept"),
            ("once", "non_reentrant"),
        )
    ]
    + [
        LayerCase("each-in-turn", transfers="each_in_turn", schedule="FBFB"),
        LayerCase("calibrated-kept-exchange", transfers="once", calibrated=True, recompute="kept"),
        LayerCase("undriven-kept-exchange", recompute="kept", schedule="FFBB", driven=False),
        LayerCase("smart-kept-exchange", transfers="once", recompute="kept", schedule="FFBB", group_size=2),
        LayerCase("calibrated-in-turn", calibrated=True, schedule="FBFB"),
        LayerCase("calibrated-undriven", calibrated=True, driven=False),
    ]
)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def test_materialized_layers_equal_the_reference() -> None:
    results = run_ranks(compare_with_reference, 4, CASES, timeout_s=180)
    for case in CASES:
        for result in (of_rank[case.name] for of_rank in results):
            assert result.errors, case.name
            worst = max(result.errors.values())
            assert worst <= TOLERANCE[case.dtype], (case.name, result.errors)
    replicated = [name for name, result in results[0].items() if any(result.num_replicas)]
    assert len(replicated) > len(CASES) * 3 // 4


class Stack:
    """Run some layers one after another, and record the largest memory of their replicas."""

    def __init__(self, rank: int, world_size: int, case: LayerCase, num_layers: int) -> None:
        self.case, self.rank = case, rank
        self.runtime = MoERuntime(DrawnPlacements(case))
        owner_E = np.arange(case.num_experts) * world_size // case.num_experts
        self.rng = np.random.default_rng(case.seed)
        self.owner_E = owner_E
        weights = draw_weights(case.seed, case.num_experts, 5, 6, case.activation, case.biases)
        self.layers = [build_layer(case, owner_E, weights, self.runtime)[0] for _ in range(num_layers)]
        self.sampled: list[tuple[int, int]] = []

    def forward(self, world_size: int) -> Tensor:
        batch = draw_inputs(self.case, self.owner_E, world_size, self.rng)
        hidden = batch.of_rank(batch.hidden, self.rank).to(self.case.dtype).requires_grad_()
        probs = batch.of_rank(batch.probs, self.rank)
        routing_map = batch.of_rank(batch.routing_map, self.rank)
        for number, layer in enumerate(self.layers):
            hidden = hidden + moe_forward(
                layer, hidden, probs, routing_map, ACTIVATIONS["swiglu"], first=number == 0
            )
            hidden = _Sampled.apply(self, hidden)
        return hidden

    def sample(self) -> None:
        """Bytes of replicas' weights, and of all tensors with the length of one expert."""
        of_weights = sum(item.held_bytes for item in _alive(ReplicaWeights))
        numel = self.layers[0].experts.layout().numel
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in _alive(Tensor)
            if tensor.shape == (numel,) and tensor.untyped_storage().nbytes()
        }
        self.sampled.append((of_weights, sum(storages.values())))


class _Sampled(torch.autograd.Function):
    """Sample the memory between layers, forward and backward."""

    @staticmethod
    def forward(ctx: object, stack: Stack, hidden: Tensor) -> Tensor:
        ctx.stack = stack  # type: ignore[attr-defined]
        stack.sample()
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[None, Tensor]:
        stack = ctx.stack  # type: ignore[attr-defined]
        stack.sample()
        return None, gradient


def _alive[T](kind: type[T]) -> Iterator[T]:
    return (item for item in gc.get_objects() if isinstance(item, kind))


# Steps of an iteration, and the group size of the smart schedule.
SCHEDULES = (("FB", None), ("FBFB", None), ("FFBFBB", None), ("FFBFBB", 1))


def resident_replicas(
    rank: int, world_size: int, mode: str
) -> list[tuple[str, list[tuple[int, int]], ExpertMemory]]:
    """Sampled bytes of each schedule, and the accounted bytes."""
    gc.freeze()  # objects that exist already are not searched
    return [(steps, *_sampled_replicas(rank, world_size, mode, steps, size)) for steps, size in SCHEDULES]


def _sampled_replicas(
    rank: int, world_size: int, mode: str, schedule: str, group_size: int | None
) -> tuple[list[tuple[int, int]], ExpertMemory]:
    gc.collect()
    case = LayerCase(f"memory-{mode}", placement="everywhere", transfers=mode, group_size=group_size)
    stack = Stack(rank, world_size, case, num_layers=4)
    num_micro_batches = schedule.count("F")
    stack.runtime.begin_iteration(num_micro_batches)
    outputs: list[Tensor] = []
    waiting = iter(outputs)  # their graphs are kept, as Megatron keeps some
    for step in schedule:
        if step == "F":
            outputs.append(stack.forward(world_size))
        else:
            next(waiting).sum().backward()
    stack.runtime.finish_gradients()
    stack.runtime.end_iteration()
    owned = case.num_experts // world_size
    stage = PipelineStage((4,), num_stages=schedule.index("B"))  # as many passes forward first
    memory = expert_memory(
        held=HeldReplicas(LIVES[mode], stage, num_micro_batches),
        slots_per_device=4 * owned,
        replicas_per_layer=case.num_experts - owned,
        owned_per_layer=owned,
        expert_elements=2 * stack.layers[0].experts.layout().numel,  # fp64 here, sums count as fp32
        dtype_bytes=4,
        gradient_bytes=4,
        optimizer=ExpertOptimizer(),
        buffered_bytes=HOST_MESSAGES.buffered_bytes,
    )
    return stack.sampled, memory


@pytest.mark.parametrize("mode", LIVES)
def test_replicas_take_the_accounted_memory(mode: str) -> None:
    """Replicas' weights exist for at most one layer, all layers, or all layers and passes in flight."""
    for of_rank in run_ranks(resident_replicas, 2, mode, timeout_s=60):
        for schedule, sampled, memory in of_rank:
            of_weights = [weights for weights, _ in sampled]
            assert max(of_weights) == memory.replica_parameters_bytes, schedule
            everything = max(everything for _, everything in sampled)
            assert everything <= memory.above_expert_parallelism_bytes, schedule
            if mode == "rematerialized":
                # Between layers of the forward pass there are no replicas.
                assert max(of_weights[: 4 * schedule.index("B")]) == 0


def forget_to_finish(rank: int, world_size: int) -> str:
    case = LayerCase("forgotten", placement="everywhere", transfers="once")
    stack = Stack(rank, world_size, case, num_layers=1)
    stack.runtime.begin_iteration(2)
    stack.forward(world_size).sum().backward()
    with pytest.raises(RuntimeError) as error:
        stack.runtime.end_iteration()
    stack.runtime.finish_gradients()
    return str(error.value)


def test_gradients_that_would_be_lost_raise_an_error() -> None:
    assert all("finish_gradients" in message for message in run_ranks(forget_to_finish, 2, timeout_s=60))


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_second_gather_ends_before_the_next_exchange_if_both_share_a_process_group(in_turn: bool) -> None:
    """Otherwise messages of the transfer and of combine's backward pass mix, and ranks get wrong sizes."""
    weights, transfer = mock.Mock(state=WeightState.OWNED), mock.Mock()
    owner_E = np.array([0, 1])
    materialization = Materialization(
        ExpertPlacement(owner_E, np.ones((2, 2), dtype=bool)),
        0,
        weights,
        transfer,
        rematerialize=True,
        in_turn=in_turn,
        on_backward=lambda gradients: None,
    )
    materialization.release(torch.ones(3, requires_grad=True)).sum().backward()
    awaited = [mock.call.wait()] if in_turn else []
    assert weights.mock_calls == [mock.call.release(), mock.call.start(transfer), *awaited]
