"""One rank's MoE layer on the runtime, driven like by an adapter and compared with the reference.

Shape letters: T tokens of this rank, M model dim, F ffn dim, E experts, D devices.
"""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fssdp.planning.placement.group_ring import GroupRing
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.row_exchanges.deduplicated_exchange import DeduplicatedExchange
from megatron_fssdp.runtime.exchange.row_exchanges.megatron_exchange import MegatronExchange
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord
from megatron_fssdp.runtime.execution.kept_exchanges import RecomputedFunction
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
from megatron_fssdp.runtime.execution.layer_load import LayerLoad
from megatron_fssdp.runtime.execution.layer_pass import run_layer
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.experts.expert_activation import ExpertActivation
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout
from megatron_fssdp.runtime.experts.grouped_ffn import grouped_ffn
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.strategy import Strategy

from .drawn_placements import DrawnPlacements, profile_of, strategy_of
from .layer_case import ACTIVATIONS, CaseResult, Inputs, LayerCase, draw_inputs, placed
from .reference_layer import draw_weights, reference_forward

STEP_SIZE = 0.05


def noting(exchange: MegatronExchange, records: list[DispatchRecord]) -> MegatronExchange:
    """Keep the record when it is complete, because a recomputed forward pass does not reach its end."""
    start = exchange.start

    def start_and_note(
        record: DispatchRecord, placement: ExpertPlacement, on_host: Sequence[np.ndarray] = ()
    ) -> None:
        start(record, placement, on_host)
        records.append(record)

    exchange.start = start_and_note  # type: ignore[method-assign]
    return exchange


def moe_forward(
    executor: LayerExecutor,
    hidden: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    activation: ExpertActivation,
    *,
    probs_on_input: bool = False,
    exchanges: list[DispatchRecord] | None = None,
    first: bool = True,
    exchange: MegatronExchange | None = None,
) -> Tensor:
    """The layer's forward pass, with what comes before the layer."""
    if executor.groups.transfers is not None:
        hidden = executor.launch(hidden, first=first)
    compute = partial(grouped_ffn, activation=activation, probs_on_input=probs_on_input)
    exchange = noting(exchange or MegatronExchange(executor.groups), [] if exchanges is None else exchanges)
    output, _ = run_layer(executor, hidden, probs, routing_map, compute, exchange=exchange)
    return output


def build_layer(
    case: LayerCase, owner_E: np.ndarray, weights: list[list[Tensor]], runtime: MoERuntime
) -> tuple[LayerExecutor, dict[int, list[torch.nn.Parameter]]]:
    """This rank's executor over copies of the experts it owns."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = {
        int(e): [torch.nn.Parameter(placed(tensor, case)) for tensor in weights[e]]
        for e in np.flatnonzero(owner_E == rank)
    }
    topology = Topology.uniform(world_size, case.num_nodes)
    executor = runtime.add_layer(
        LayerContext(1, owner_E, topology, profile_of(case)),
        ExpertGroups(
            dist.group.WORLD,
            topology,
            None if case.transfers.endswith("in_turn") else transfer_group(),
            ring=None if case.group_size is None else GroupRing(rank, world_size, case.group_size),
            one_queue=case.one_queue,
        ),
        parameters,
        layout=ExpertLayout.of([tensor.to(case.dtype) for tensor in weights[0]]),
    )
    return executor, parameters


@cache
def transfer_group() -> dist.ProcessGroup:
    return dist.new_group()


def compare_with_reference(rank: int, world_size: int, cases: Sequence[LayerCase]) -> dict[str, CaseResult]:
    """Run every case on this rank; return results by name of the case."""
    results = {}
    for case in cases:
        try:
            results[case.name] = run_case(rank, world_size, case)
        except Exception as error:
            raise RuntimeError(f"case {case.name} on rank {rank}: {error}") from error
    return results


def run_case(rank: int, world_size: int, case: LayerCase) -> CaseResult:
    rng = np.random.default_rng(case.seed)
    owner_E = np.array(case.owners) if case.owners else even_owners(case.num_experts, world_size)
    weights = draw_weights(case.seed, case.num_experts, *case.sizes, case.activation, case.biases)
    weights = [[t.to(case.dtype).double().requires_grad_() for t in tensors] for tensors in weights]
    runtime = MoERuntime(strategy_of(case), measure=True, check_plans=True)
    executor, parameters = build_layer(
        case, owner_E, [[t.detach() for t in tensors] for tensors in weights], runtime
    )
    result = CaseResult()
    for _ in range(case.num_iterations):
        batches = [draw_inputs(case, owner_E, world_size, rng) for _ in range(case.schedule.count("F"))]
        if case.driven:
            says = case.transfers.startswith("resident") or not case.transfers.endswith("in_turn")
            runtime.begin_iteration(len(batches) if says else None)
        held = dict(parameters)
        if case.transfers.startswith("resident"):
            held |= _keep_some(executor, runtime.strategy, case, weights, rank)
        plan = executor.plan_iteration()
        result.num_present.append(len(plan.placement.experts_on(rank)))
        result.digests.append(plan.placement.digest())
        result.deduplicated.append(plan.deduplicated)
        own = _run_iteration(executor, case, batches, rank, result)
        result.num_replicas.append(max(plan.placement.num_replicas, executor.load.num_replicas))
        runtime.finish_gradients()
        _compare_iteration(case, batches, weights, held, own, rank, result)
        if case.driven:
            counts_DE = np.stack(
                [
                    sum(batch.of_rank(batch.routing_map, d).sum(0).numpy() for batch in batches)
                    for d in range(world_size)
                ]
            )
            load = runtime.end_iteration()[0]
            assert np.array_equal(load.counts_DE, counts_DE)
            if rank == 0:
                _check_spread(load, batches, owner_E, case.num_nodes)
        with torch.no_grad():
            for expert, tensors in enumerate(weights):
                for i, tensor in enumerate(tensors):
                    assert tensor.grad is not None
                    tensor -= STEP_SIZE * tensor.grad
                    tensor.copy_(tensor.to(case.dtype))
                    tensor.grad = None
                    if expert in parameters:
                        parameters[expert][i].grad = None
                        parameters[expert][i].copy_(tensor)
    return result


def _check_spread(load: LayerLoad, batches: Sequence[Inputs], owner_E: np.ndarray, num_nodes: int) -> None:
    """Compare the histograms of nodes and devices with those of sets of places, token by token."""
    node_of_device = Topology.uniform(len(load.by_devices_D), num_nodes).node_of_device_D
    for histogram, place_E in ((load.by_nodes_N, node_of_device[owner_E]), (load.by_devices_D, owner_E)):
        places = [
            len({place_E[e] for e in np.flatnonzero(row)}) for b in batches for row in b.routing_map.numpy()
        ]
        assert histogram.tolist() == np.bincount(places, minlength=len(histogram) + 1)[1:].tolist()


def _keep_some(
    executor: LayerExecutor, strategy: Strategy, case: LayerCase, weights: list[list[Tensor]], rank: int
) -> dict[int, list[torch.nn.Parameter]]:
    """Change the resident replicas to the drawn placement before an iteration."""
    assert isinstance(strategy, DrawnPlacements)
    placement = strategy.drawn(executor.context).placement
    replicas = {
        expert: [torch.nn.Parameter(placed(tensor.detach(), case)) for tensor in weights[expert]]
        for expert in placement.experts_on(rank)
        if placement.owner_E[expert] != rank
    }
    executor.keep(placement, replicas)
    return replicas


Leaves = list[tuple[Tensor, Tensor, Tensor | None]]


def _run_iteration(
    executor: LayerExecutor, case: LayerCase, batches: list[Inputs], rank: int, result: CaseResult
) -> Leaves:
    """Run passes in the case's order; return hidden states, probs and output of every micro-batch."""
    activation = ACTIVATIONS[case.activation]
    leaves: Leaves = []
    num_backwards = 0
    for step in case.schedule:
        if step == "F":
            batch = batches[len(leaves)]
            hidden = batch.of_rank(batch.hidden, rank).to(case.device, case.dtype)
            hidden.requires_grad_("hidden" in case.inputs)
            probs = batch.of_rank(batch.probs, rank).to(
                case.device, torch.promote_types(case.dtype, torch.float32)
            )
            probs.requires_grad_("probs" in case.inputs)
            routing_map = batch.of_rank(batch.routing_map, rank).to(case.device)

            def forward(h: Tensor, p: Tensor, routing_map: Tensor = routing_map) -> Tensor:
                exchange = None
                sends_once = case.deduplicated and (
                    case.deduplicated != "by_price" or executor.plan_iteration().deduplicated
                )
                if sends_once:
                    most_choices = None if case.deduplicated == "unknown" else case.top_k
                    exchange = DeduplicatedExchange(executor.groups, most_choices)
                return moe_forward(
                    executor,
                    h,
                    p,
                    routing_map,
                    activation,
                    probs_on_input=case.probs_on_input,
                    exchange=exchange,
                )

            if case.recompute is None:
                output = forward(hidden, probs)
            else:
                is_kept = case.recompute == "kept"
                output = checkpoint(
                    RecomputedFunction(forward) if is_kept else forward,
                    hidden,
                    probs,
                    use_reentrant=is_kept or case.recompute == "reentrant",
                )
            leaves.append((hidden, probs, output))
        else:
            batch = batches[num_backwards]
            hidden, probs, output = leaves[num_backwards]
            assert output is not None
            (output * batch.of_rank(batch.cotangent, rank).to(case.device, output.dtype)).sum().backward()
            leaves[num_backwards] = (hidden, probs, output.detach())
            num_backwards += 1
    return leaves


def _compare_iteration(
    case: LayerCase,
    batches: list[Inputs],
    weights: list[list[Tensor]],
    parameters: dict[int, list[torch.nn.Parameter]],
    own: Leaves,
    rank: int,
    result: CaseResult,
) -> None:
    for batch, (hidden, probs, output) in zip(batches, own, strict=True):
        all_hidden = batch.hidden.clone().requires_grad_()
        all_probs = batch.probs.clone().requires_grad_()
        wanted = reference_forward(
            all_hidden,
            all_probs,
            batch.routing_map,
            weights,
            case.activation,
            probs_on_input=case.probs_on_input,
        )
        (wanted * batch.cotangent).sum().backward()
        assert all_hidden.grad is not None
        assert all_probs.grad is not None
        result.compare("output", output, batch.of_rank(wanted.detach(), rank))
        if "hidden" in case.inputs:
            result.compare("hidden gradient", hidden.grad, batch.of_rank(all_hidden.grad, rank))
        if "probs" in case.inputs:
            result.compare("probs gradient", probs.grad, batch.of_rank(all_probs.grad, rank))
    for expert, tensors in parameters.items():
        for i, parameter in enumerate(tensors):
            result.compare(f"parameter {i} gradient", parameter.grad, weights[expert][i].grad)
