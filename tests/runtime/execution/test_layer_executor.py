"""The layer executor's iterations, plans and loads, and where gradients go.

What it computes is compared with a reference in ``test_executor_parity.py``.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.transfer.transfer_plan import plain_transfer
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord
from megatron_fssdp.runtime.execution import known_exchange
from megatron_fssdp.runtime.execution.kept_exchanges import RecomputedFunction
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.replicas.local_experts import LocalExperts
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import Strategy
from megatron_fssdp.testing import run_ranks

from ..drawn_placements import DrawnPlacements, strategy_of
from ..layer_case import ACTIVATIONS, FFN_DIM, MODEL_DIM, Inputs, LayerCase, draw_inputs
from ..rank_layer import build_layer, draw_weights, moe_forward

RANDOM = LayerCase("executor", biases=True, num_nodes=2)
EXPERT_BYTES = 8 * (2 * FFN_DIM * MODEL_DIM + MODEL_DIM * FFN_DIM + 2 * FFN_DIM + MODEL_DIM)


class Layer:
    """The layer of a case on this rank, with its inputs."""

    def __init__(self, case: LayerCase, strategy: Any = None, runtime: MoERuntime | None = None) -> None:
        world_size = dist.get_world_size()
        self.case = case
        self.owner_E = np.array(case.owners) if case.owners else even_owners(case.num_experts, world_size)
        self.rng = np.random.default_rng(case.seed)
        weights = draw_weights(case.seed, case.num_experts, MODEL_DIM, FFN_DIM, case.activation, case.biases)
        self.runtime = runtime or MoERuntime(strategy or strategy_of(case), measure=True)
        self.executor, self.parameters = build_layer(case, self.owner_E, weights, self.runtime)
        self.exchanges: list[DispatchRecord] = []

    def draw(self) -> Inputs:
        return draw_inputs(self.case, self.owner_E, dist.get_world_size(), self.rng)

    def forward(self, batch: Inputs, recompute: bool | None = None) -> Tensor:
        rank, dtype = dist.get_rank(), self.case.dtype
        hidden = batch.of_rank(batch.hidden, rank).to(dtype).requires_grad_()
        probs = batch.of_rank(batch.probs, rank)
        routing_map = batch.of_rank(batch.routing_map, rank)

        def run(hidden: Tensor) -> Tensor:
            activation = ACTIVATIONS[self.case.activation]
            return moe_forward(
                self.executor, hidden, probs, routing_map, activation, exchanges=self.exchanges
            )

        return run(hidden) if recompute is None else checkpoint(run, hidden, use_reentrant=recompute)

    def gradients(self) -> dict[tuple[int, int], Tensor]:
        """Copies of this rank's gradients by expert and tensor; missing gradients are left out."""
        return {
            (expert, i): parameter.grad.clone()
            for expert, tensors in self.parameters.items()
            for i, parameter in enumerate(tensors)
            if parameter.grad is not None
        }

    def each_parameter(self) -> Iterator[torch.nn.Parameter]:
        for tensors in self.parameters.values():
            yield from tensors


def train(layer: Layer, num_iterations: int = 1) -> None:
    for _ in range(num_iterations):
        layer.runtime.begin_iteration()
        layer.forward(layer.draw()).sum().backward()
        layer.runtime.end_iteration()


def gradients_add_up(rank: int, world_size: int) -> None:
    layer = Layer(RANDOM)
    batch = layer.draw()
    layer.forward(batch).sum().backward()
    once = layer.gradients()
    assert len(once) == 4 * len(layer.parameters)
    layer.forward(batch).sum().backward()
    for key, gradient in layer.gradients().items():
        torch.testing.assert_close(gradient, 2 * once[key], rtol=1e-12, atol=1e-12)


def test_gradients_add_up_over_backward_passes() -> None:
    run_ranks(gradients_add_up, 4)


def main_grads_take_the_sums(rank: int, world_size: int) -> None:
    for dtype, main_dtype, tolerance in (
        (torch.float64, torch.float64, 1e-12),
        (torch.bfloat16, torch.float32, 2e-2),
    ):
        case = replace(RANDOM, dtype=dtype)
        plain, layer = Layer(case), Layer(case)
        for parameter in layer.each_parameter():
            parameter.main_grad = torch.full(parameter.shape, 2.0, dtype=main_dtype)
        main_grads = [parameter.main_grad for parameter in layer.each_parameter()]
        batch = plain.draw()
        plain.forward(batch).sum().backward()
        layer.forward(batch).sum().backward()
        for parameter, main_grad, twin in zip(
            layer.each_parameter(), main_grads, plain.each_parameter(), strict=True
        ):
            assert parameter.grad is None
            assert parameter.main_grad is main_grad, "the optimizer's buffer was replaced"
            assert main_grad.dtype is main_dtype
            assert twin.grad is not None
            wanted = twin.grad.to(main_dtype)
            assert (main_grad - 2 - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item())


def test_gradients_are_added_to_main_grad_where_parameters_have_one() -> None:
    run_ranks(main_grads_take_the_sums, 2)


def frozen_parameters_get_nothing(rank: int, world_size: int) -> None:
    plain, layer = Layer(RANDOM), Layer(RANDOM)
    frozen = set()
    for expert, tensors in layer.parameters.items():
        for i, parameter in enumerate(tensors):
            if (expert + i) % 2:
                parameter.requires_grad_(False)
                frozen.add((expert, i))
    batch = layer.draw()
    plain.forward(batch).sum().backward()
    layer.forward(batch).sum().backward()
    wanted, got = plain.gradients(), layer.gradients()
    assert set(got) == set(wanted) - frozen
    assert all(torch.equal(got[key], wanted[key]) for key in got)
    if rank == 0:
        for parameter in layer.each_parameter():
            parameter.requires_grad_(False)
    layer.forward(batch).sum().backward()  # this rank trains nothing, but other ranks wait for it


def test_frozen_parameters_get_no_gradient_and_others_do() -> None:
    run_ranks(frozen_parameters_get_nothing, 4, timeout_s=30)


def evaluate(rank: int, world_size: int) -> None:
    for driven in (True, False):
        layer = Layer(RANDOM, DrawnPlacements(replace(RANDOM, placement="everywhere")))
        if driven:
            train(layer, 2)
        else:
            layer.forward(layer.draw()).sum().backward()
        num_seen = len(layer.executor.history)
        batch = layer.draw()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                evaluated = layer.forward(batch)
            assert not evaluated.requires_grad
            assert not layer.executor.load.counts_DE.any()
        layer.runtime.begin_iteration()
        output = layer.forward(batch)
        torch.testing.assert_close(evaluated, output.detach(), rtol=1e-12, atol=1e-12)
        assert len(layer.executor.history) == num_seen
        output.sum().backward()
        load = layer.runtime.end_iteration()[0]
        assert load.counts_DE.sum() == batch.routing_map.sum()
        if rank == 0:
            assert load.spag_bytes == load.sprs_bytes == load.num_replicas * EXPERT_BYTES
        assert len(layer.executor.history) == num_seen + 1


def test_an_evaluation_neither_hangs_nor_counts() -> None:
    run_ranks(evaluate, 4, timeout_s=30)


def recompute_counts_once(rank: int, world_size: int) -> None:
    for reentrant in (True, False):
        layer = Layer(RANDOM)
        batches = [layer.draw(), layer.draw()]
        layer.runtime.begin_iteration()
        for output in [layer.forward(batch, recompute=reentrant) for batch in batches]:
            output.sum().backward()
        assert len(layer.exchanges) == 4
        load = layer.runtime.end_iteration()[0]
        wanted_E = sum(batch.routing_map.sum(0) for batch in batches)
        assert np.array_equal(load.counts_DE.sum(0), wanted_E.numpy())
        assert len(layer.executor.history) == 1
        if rank == 0:
            assert load.sprs_bytes == 2 * load.num_replicas * EXPERT_BYTES
            assert load.spag_bytes == 4 * load.num_replicas * EXPERT_BYTES  # the layer gathers again
            assert load.device_D.sum() == load.counts_DE.sum()


def test_a_recomputed_forward_is_not_counted_again() -> None:
    run_ranks(recompute_counts_once, 4, timeout_s=30)


def plans_last_an_iteration(rank: int, world_size: int) -> None:
    layer = Layer(RANDOM)
    executor, runtime = layer.executor, layer.runtime
    plans = []
    for _ in range(4):
        runtime.begin_iteration()
        plan = executor.plan_iteration()
        for recompute in (None, True, False):
            output = layer.forward(layer.draw(), recompute)
            assert executor.plan_iteration() is plan
            output.sum().backward()
            assert executor.plan_iteration() is plan
        with torch.no_grad():
            layer.forward(layer.draw())
        assert executor.plan_iteration() is plan
        runtime.end_iteration()
        plans.append(plan)
    assert len({plan.placement for plan in plans}) == 4
    # The training loop is known now: a backward pass alone no longer ends an iteration, and a missing
    # end mark loses no load.
    num_seen = len(executor.history)
    runtime.begin_iteration()
    layer.forward(layer.draw()).sum().backward()
    runtime.begin_iteration()
    assert len(executor.history) == num_seen + 1
    assert executor.history.counts_DE(0).any()


def plans_last_until_a_backward_pass(rank: int, world_size: int) -> None:
    layer = Layer(RANDOM)
    first = layer.executor.plan_iteration()
    with torch.no_grad():
        layer.forward(layer.draw())
    batch = layer.draw()
    output = layer.forward(batch)
    assert layer.executor.plan_iteration() is first
    output.sum().backward()
    assert np.array_equal(layer.executor.history.counts_DE(0).sum(0), batch.routing_map.sum(0).numpy())
    assert layer.executor.plan_iteration() is not first


def test_a_plan_is_frozen_within_an_iteration_and_replaced_in_the_next() -> None:
    run_ranks(plans_last_an_iteration, 4, timeout_s=30)


def test_without_a_training_loop_each_backward_pass_ends_an_iteration() -> None:
    run_ranks(plans_last_until_a_backward_pass, 2, timeout_s=30)


class RankDependent(Strategy):
    """A broken strategy, whose plan depends on the rank."""

    smart_schedule = False
    exchange = "pairs"

    def __init__(self) -> None:
        pass

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        present_ED = np.zeros((context.num_experts, context.num_devices), dtype=bool)
        present_ED[0] = dist.get_rank() == 2
        present_ED[np.arange(context.num_experts), context.owner_E] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        return LayerPlan(placement, plain_transfer(placement))


def disagree(rank: int, world_size: int) -> str:
    layer = Layer(RANDOM, runtime=MoERuntime(RankDependent(), check_plans=True))
    with pytest.raises(
        RuntimeError, match=r"placement of layer 1 is not the same.*ranks \[2\] differ"
    ) as info:
        layer.executor.plan_iteration()
    return str(info.value)


def test_plans_that_differ_are_refused_on_all_ranks() -> None:
    assert len(run_ranks(disagree, 4, timeout_s=30)) == 4


def loads_and_exchanges(
    rank: int, world_size: int, cases: list[LayerCase]
) -> list[tuple[Any, list[DispatchRecord]]]:
    found = []
    for case in cases:
        layer = Layer(case)
        layer.runtime.begin_iteration()
        batches = [layer.draw(), layer.draw()]
        for output in [layer.forward(batch) for batch in batches]:
            output.sum().backward()
        load = layer.runtime.end_iteration()[0]
        own_E = sum(batch.of_rank(batch.routing_map, rank).sum(0) for batch in batches)
        numbers = [(r.send_D, r.receive_D, r.rows_per_expert) for r in layer.exchanges]
        found.append((load, own_E.numpy(), numbers))
    return found


def test_recorded_loads_equal_the_work_of_the_devices() -> None:
    cases = [
        replace(RANDOM, name=f"load-{i}", num_nodes=num_nodes, owners=owners, placement=placement)
        for i, (num_nodes, owners, placement) in enumerate(
            [
                (1, None, "random"),
                (2, None, "random"),
                (4, None, "random"),
                (2, None, "owners"),
                (2, None, "everywhere"),
                (2, (3, 3, 0, 0, 1, 0, 3, 3), "random"),
            ]
        )
    ]
    results = run_ranks(loads_and_exchanges, 4, cases, timeout_s=30)
    for i, case in enumerate(cases):
        load = results[0][i][0]
        owner_E = case.owners or (0, 0, 1, 1, 2, 2, 3, 3)
        counts_DE = np.stack([results[d][i][1] for d in range(4)])
        owner_D, device_D, crossing = [0] * 4, [0] * 4, 0
        for d in range(4):
            assert np.array_equal(results[d][i][0].counts_DE, counts_DE)
            for e in range(8):
                owner_D[owner_E[e]] += int(counts_DE[d, e])
            for sent_D, received_D, rows_per_expert in results[d][i][2]:
                assert sum(received_D) == sum(rows_per_expert)
                device_D[d] += sum(rows_per_expert)
                node = d * case.num_nodes // 4
                crossing += sum(n for to, n in enumerate(sent_D) if to * case.num_nodes // 4 != node)
        assert load.owner_D.tolist() == owner_D
        assert load.device_D.tolist() == device_D
        assert load.cross_node_tokens == crossing
        assert load.layer == 1
        assert load.spag_bytes == load.sprs_bytes == 2 * load.num_replicas * EXPERT_BYTES
        assert load.num_replicas == {"owners": 0, "everywhere": 24}.get(case.placement, load.num_replicas)


def count_exchanges(rank: int, world_size: int) -> tuple[int, int]:
    """Messages to the other rank in the forward and in the backward pass."""
    layer = Layer(replace(RANDOM, placement="owners"))
    layer.runtime.begin_iteration()
    batch = layer.draw()
    with CommDebugMode() as collectives, mock.patch.object(dist, "isend", wraps=dist.isend) as messages:
        output = layer.forward(batch)
        in_forward = messages.call_count
        output.sum().backward()
    assert collectives.get_total_counts() == 0
    return in_forward, messages.call_count - in_forward


def test_a_pass_has_one_exchange_of_counts_and_three_of_rows_and_the_backward_pass_two() -> None:
    for in_forward, in_backward in run_ranks(count_exchanges, 2):
        assert in_forward == 4
        assert in_backward == 2  # rows there and back; these probs need no gradient


def recompute_with_another_routing(rank: int, world_size: int) -> float:
    """Error of the gradients if the router flips in the recomputation; counts must not be exchanged."""
    gradients = []
    for flips in (False, True):
        layer = Layer(replace(RANDOM, name="kept"))
        layer.runtime.begin_iteration(1)
        batch = layer.draw()
        hidden = batch.of_rank(batch.hidden, rank).requires_grad_()
        probs, routing_map = (batch.of_rank(x, rank) for x in (batch.probs, batch.routing_map))
        maps = iter([routing_map, routing_map.roll(1, dims=1) if flips else routing_map])

        def run(hidden: Tensor, layer: Layer = layer, probs: Tensor = probs, maps: Any = maps) -> Tensor:
            return moe_forward(layer.executor, hidden, probs, next(maps), ACTIVATIONS["swiglu"])

        output = checkpoint(RecomputedFunction(run), hidden, use_reentrant=True)
        with mock.patch.object(known_exchange, "start_counts", side_effect=AssertionError("counts")):
            output.sum().backward()
        layer.runtime.finish_gradients()
        assert hidden.grad is not None
        gradients.append(torch.cat([hidden.grad.view(-1), *(x.view(-1) for x in layer.gradients().values())]))
    return float((gradients[0] - gradients[1]).abs().max())


def test_a_recomputed_pass_keeps_its_rows_if_the_router_flips_and_exchanges_no_counts() -> None:
    assert run_ranks(recompute_with_another_routing, 2) == [0.0, 0.0]


def begin_without_a_plan(rank: int, world_size: int) -> None:
    layer = Layer(RANDOM)
    batch = layer.draw()
    routing_map = batch.of_rank(batch.routing_map, rank)
    with pytest.raises(RuntimeError, match=r"layer 1: .*without a plan.*call LayerExecutor.plan_iteration"):
        layer.executor.begin_micro_batch(routing_map)


def test_a_micro_batch_without_a_plan_is_refused() -> None:
    run_ranks(begin_without_a_plan, 2)


def build_wrongly(rank: int, world_size: int) -> None:
    layer = Layer(RANDOM)
    context, groups = layer.executor.context, layer.executor.groups
    strategy = layer.runtime.strategy
    missing = dict(list(layer.parameters.items())[1:])
    with pytest.raises(ValueError, match=r"got parameters of experts .*, wanted those this rank owns"):
        LayerExecutor(context, groups, LocalExperts("layer 1", missing), strategy)
    none_owned = LayerContext(7, np.full(8, 1 - rank), context.topology)
    with pytest.raises(ValueError, match=r"layer 7: got 0 expert layouts .*layout argument"):
        LayerExecutor(none_owned, groups, LocalExperts("layer 7", {}), strategy)
    some = next(iter(layer.parameters))
    uneven = {**layer.parameters, some: [torch.nn.Parameter(torch.zeros(2, 2))] * 4}
    with pytest.raises(ValueError, match="got 2 expert layouts"):
        LayerExecutor(context, groups, LocalExperts("layer 1", uneven), strategy)


def test_parameters_that_do_not_fit_are_refused() -> None:
    run_ranks(build_wrongly, 2)


def two_layers(rank: int, world_size: int) -> None:
    runtime = MoERuntime(DrawnPlacements(RANDOM), measure=True)
    layers = [Layer(replace(RANDOM, name=name), runtime=runtime) for name in ("first", "second")]
    runtime.begin_iteration()
    batches = [layer.draw() for layer in layers]
    outputs = [layer.forward(batch) for layer, batch in zip(layers, batches, strict=True)]
    outputs[1].sum().backward()
    outputs[0].sum().backward()
    loads = runtime.end_iteration()
    for load, batch in zip(loads, batches, strict=True):
        assert np.array_equal(load.counts_DE.sum(0), batch.routing_map.sum(0).numpy())
        assert bool(load.device_D.any()) == (rank == 0), "one device of a group computes the loads"


def test_layers_of_one_runtime_record_their_loads_separately() -> None:
    run_ranks(two_layers, 2)
