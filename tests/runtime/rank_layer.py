"""One rank's MoE layer on the runtime, driven like by an adapter and compared with the reference.

Shape letters: T tokens of this rank, M model dim, F ffn dim, E experts, D devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_fssdp.config.strategy_registry import STRATEGIES
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.group_ring import GroupRing
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import plain_transfer, two_level_transfer
from megatron_fssdp.runtime.exchange.deduplicated_exchange import DeduplicatedExchange
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.row_exchanges import MegatronExchange
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord
from megatron_fssdp.runtime.execution.kept_exchanges import RecomputedFunction
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
from megatron_fssdp.runtime.execution.layer_load import LayerLoad
from megatron_fssdp.runtime.execution.layer_pass import run_layer
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.experts.expert_activation import ExpertActivation
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout
from megatron_fssdp.runtime.experts.grouped_ffn import grouped_ffn
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan, Strategy

from .reference_layer import BLOCK, CLAMP, OFFSET, draw_weights, reference_forward

MODEL_DIM, FFN_DIM = 5, 6
STEP_SIZE = 0.05

ACTIVATIONS = {
    "gelu": ExpertActivation(functional.gelu),
    "relu": ExpertActivation(functional.relu),
    "squared_relu": ExpertActivation(lambda x: functional.relu(x).square()),
    "swiglu": ExpertActivation(functional.silu, gated=True),
    "clamped_geglu": ExpertActivation(
        lambda x: x * torch.sigmoid(1.702 * x), gated=True, clamp=CLAMP, linear_offset=OFFSET
    ),
    "interleaved_swiglu": ExpertActivation(functional.silu, gated=True, interleave=BLOCK),
}


@dataclass(frozen=True)
class LayerCase:
    """One combination to compare with the reference.

    Attributes:
        name: Test id.
        placement: "owners", "random", "everywhere", "nowhere_else" (random, but one rank holds
            nothing at all), "replicas_only" (random, but one rank owns nothing and holds a
            replica), or a strategy's name.
        settings: Settings of the strategy, as (key, value) pairs.
        owners: Owner of each expert; Megatron's even owners by default.
        routing: "skewed", "dropped" (some choices are missing, some tokens have none),
            "one_expert", "one_device" (only experts of the last device) or "even".
        tokens: Tokens of each rank; some random small numbers by default.
        schedule: Order of forwards and backwards of an iteration's micro-batches.
        recompute: None, "reentrant", "non_reentrant", or "kept" (reentrant, and the exchange is kept).
        transfers: "in_turn" (each pass gathers, and reduces before it ends), "once" (once an
            iteration, in the background), "rematerialized" (each pass, in the background) or "each" (each
            pass by a plan of its own, with quotas, beside the dispatch) or "each_in_turn"; or "resident"
            (replicas have Parameters, gradients are summed among holders) or "resident_in_turn".
        calibrated: Whether the placement changes when the counts are known.
        group_size: Ranks of a group of the smart schedule; None exchanges with all at once.
        changes: Whether random placements run only every second iteration in steps, from the second one on.
        deduplicated: How tokens travel: "" (one row for each pair), "known" or "unknown" (deduplicated; the
            largest number of experts of a token is known or not), or "by_price" (as the plan says; costs are
            known, and rows are so large that the deduplicated exchange pays).
        one_queue: Whether CUDA devices run all kernels in the order of their issue.
        inputs: Which of "hidden" and "probs" require a gradient.
        device: Device of the layer and its inputs; "cuda" also on a virtual device.
        sizes: Model dim and ffn dim.
    """

    name: str
    placement: str = "random"
    settings: tuple[tuple[str, int], ...] = ()
    num_experts: int = 8
    top_k: int = 2
    owners: tuple[int, ...] | None = None
    activation: str = "swiglu"
    biases: bool = False
    probs_on_input: bool = False
    num_nodes: int = 1
    routing: str = "skewed"
    tokens: tuple[int, ...] | None = None
    num_iterations: int = 2
    schedule: str = "FB"
    recompute: str | None = None
    transfers: str = "in_turn"
    calibrated: bool = False
    group_size: int | None = None
    changes: bool = False
    deduplicated: str = ""
    one_queue: bool = False
    inputs: tuple[str, ...] = ("hidden", "probs")
    driven: bool = True
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    sizes: tuple[int, int] = (MODEL_DIM, FFN_DIM)

    @property
    def seed(self) -> int:
        """Random seed, which differs by the name of the case and is the same in every process."""
        return sum((i + 1) * ord(letter) for i, letter in enumerate(self.name))


@dataclass
class CaseResult:
    """The findings of one rank.

    Attributes:
        errors: Largest difference from the reference by quantity, relative to its largest value.
        num_replicas: Replicas of each iteration's placement.
        deduplicated: Whether each iteration's plan sends tokens once.
        num_present: Experts present on this rank in each iteration.
        digests: Digest of each iteration's placement.
        values: The rank's tensors that were compared, in order; missing gradients are None.
    """

    errors: dict[str, float] = field(default_factory=dict)
    num_replicas: list[int] = field(default_factory=list)
    deduplicated: list[bool] = field(default_factory=list)
    num_present: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    values: list[Tensor | None] = field(default_factory=list)

    def compare(self, what: str, got: Tensor | None, wanted: Tensor | None) -> None:
        """Record a difference; missing gradients count as zeros."""
        if wanted is None or not wanted.numel():
            return
        self.values.append(None if got is None else got.detach().cpu())
        got = torch.zeros_like(wanted) if got is None else got.detach().cpu().to(wanted.dtype)
        assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)} instead of {tuple(wanted.shape)}"
        scale = max(float(wanted.abs().max()), 1e-6)
        error = float((got - wanted).abs().max()) / scale
        self.errors[what] = max(self.errors.get(what, 0.0), error if error == error else float("inf"))


# These strategies get planted measurements; fssdp takes its limits from the settings.
MEASURING = ("fastermoe", "prophet", "quota")
# Experts are cheap to move, so that every strategy that compares costs moves some.
PROFILE = LayerProfile(
    non_moe_s=1.0,
    cluster=ClusterCost(LinkCost(0.0, 1e-3), LinkCost(0.0, 2e-3), expert_flops_per_s=1e3),
    expert_bytes=1,
    token_bytes=8,
    flops_per_token=1e3,
    memory_capacity=8,
)


class DrawnPlacements(Strategy):
    """A strategy for tests: a new random placement of one kind, and a policy, with every plan."""

    exchange = "pairs"  # the case's exchange is passed to the layer
    window = 100  # the strategy ignores the history, but tests count its iterations
    replica_life = ReplicaLife.ITERATION

    def __init__(self, case: LayerCase) -> None:
        self.kind = case.placement
        self.rng = np.random.default_rng(case.seed)
        self.rematerialize = case.transfers == "rematerialized"
        if case.transfers.startswith("resident"):
            self.replica_life = ReplicaLife.RESIDENT
        elif self.rematerialize:
            self.replica_life = ReplicaLife.LAYER_PASS
        elif case.transfers.startswith("each"):
            self.replica_life = ReplicaLife.MICRO_BATCH
        self.each_micro_batch = case.transfers.startswith("each")
        self.calibrated = case.calibrated
        self.has_steps, self.changes = case.group_size is not None, case.changes
        self.num_planned = 0

    @property
    def smart_schedule(self) -> bool:
        """Whether all ranks exchange in steps in the iteration that was planned last."""
        return self.has_steps and not (self.changes and self.num_planned % 2)

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Draw the next placement; all ranks draw the same ones."""
        self.num_planned += 1
        if context.resident is not None:
            transfer = two_level_transfer(context.resident, context.topology)
            return LayerPlan(context.resident, transfer, gather_ahead=False, resident=True)
        if self.each_micro_batch:
            return LayerPlan.owners_only(context, each_micro_batch=True)
        return self.drawn(context)

    def drawn(self, context: LayerContext) -> LayerPlan:
        """A plan with the next random placement."""
        return self._drawn(context, self.rng)

    def _drawn(self, context: LayerContext, rng: np.random.Generator) -> LayerPlan:
        shape = (context.num_experts, context.num_devices)
        share = {"owners": 0.0, "everywhere": 1.0}.get(self.kind, rng.choice([0.3, 0.6]))
        present_ED = rng.random(shape) < share
        poorest = int(np.bincount(context.owner_E, minlength=context.num_devices).argmin())
        if self.kind == "nowhere_else":
            present_ED[:, poorest] = False
        elif self.kind == "replicas_only":
            present_ED[rng.integers(context.num_experts), poorest] = True
        present_ED[np.arange(context.num_experts), context.owner_E] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        plain = rng.random() < 0.3
        return LayerPlan(
            placement,
            plain_transfer(placement) if plain else two_level_transfer(placement, context.topology),
            rematerialize=self.rematerialize,
            dispatch_policy=rng.choice(get_args(DispatchPolicy)),
        )

    def _drawn_by(self, context: LayerContext, counts_DE: np.ndarray) -> LayerPlan:
        """A plan that depends on the counts alone, and often exact quotas for them."""
        rng = np.random.default_rng(counts_DE.reshape(-1))
        plan = self._drawn(context, rng)
        tokens_ED = None
        if rng.random() < 0.7:
            present_ED, load_E = plan.placement.present_ED, counts_DE.sum(axis=0)
            tokens_ED = np.stack(
                [
                    rng.multinomial(load, here_D / here_D.sum())
                    for load, here_D in zip(load_E, present_ED, strict=True)
                ]
            )
        return replace(plan, each_micro_batch=True, tokens_ED=tokens_ED)

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The same plan, the plan with other replicas, or a new plan; all ranks draw the same."""
        if self.each_micro_batch:
            return self._drawn_by(context, counts_DE)
        if not self.calibrated:
            return plan
        drawn_ED = self.rng.random(plan.placement.present_ED.shape)
        # Some replicas are dropped, some stay, and others are added.
        present_ED = np.where(plan.placement.present_ED, drawn_ED < 0.6, drawn_ED < 0.3)
        present_ED[np.arange(context.num_experts), context.owner_E] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        transfer = two_level_transfer(placement, context.topology)
        return replace(plan, placement=placement, transfer=transfer)


def strategy_of(case: LayerCase) -> Strategy:
    """A real strategy where the case names one, otherwise random placements."""
    if case.placement in STRATEGIES:
        in_steps = {} if case.group_size is None else {"smart_schedule": True}
        by_price = {"exchange": "by_price"} if case.deduplicated == "by_price" else {}
        model, keys = STRATEGIES[case.placement].settings, {**dict(case.settings), **in_steps, **by_price}
        return build_strategy(case.placement, model.model_validate(keys))
    return DrawnPlacements(case)


def profile_of(case: LayerCase) -> LayerProfile | None:
    """The costs that the case's strategy knows."""
    if case.deduplicated == "by_price":
        cluster = replace(PROFILE.cluster, intra=LinkCost(0.0, 1e-6))
        return replace(PROFILE, cluster=cluster, token_bytes=1_000_000, choices=TokenChoices(case.top_k))
    return PROFILE if case.placement in MEASURING else None


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


@dataclass
class Inputs:
    """One micro-batch of all ranks, in rank order; fp64 values that the case's dtype can hold."""

    hidden: Tensor
    probs: Tensor
    routing_map: Tensor
    cotangent: Tensor
    tokens: Sequence[int]

    def of_rank(self, tensor: Tensor, rank: int) -> Tensor:
        """One rank's rows of a tensor of all ranks."""
        return torch.split(tensor, list(self.tokens))[rank]


def draw_inputs(case: LayerCase, owner_E: np.ndarray, world_size: int, rng: np.random.Generator) -> Inputs:
    """Weights, which are the same on every rank."""
    tokens = case.tokens or tuple(int(n) for n in rng.integers(3, 14, world_size))
    total, num_experts = sum(tokens), case.num_experts
    sigma = 0.0 if case.routing == "even" else 1.5
    score_TE = rng.normal(0, sigma, num_experts) + rng.gumbel(size=(total, num_experts))
    if case.routing == "one_expert":
        score_TE[:, rng.integers(num_experts)] += 1e3
    if case.routing == "one_device":
        score_TE[:, owner_E == owner_E.max()] += 1e3
    chosen = np.argsort(-score_TE, axis=1)[:, : case.top_k]
    routing = np.zeros((total, num_experts), dtype=bool)
    np.put_along_axis(routing, chosen, True, axis=1)
    if case.routing == "dropped":
        routing &= rng.random(routing.shape) < 0.7
        routing[rng.random(total) < 0.2] = False

    def values(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(case.dtype).double()

    probs = torch.from_numpy(rng.random((total, num_experts))).float().double()
    return Inputs(
        values(total, case.sizes[0]), probs, torch.from_numpy(routing), values(total, case.sizes[0]), tokens
    )


def placed(tensor: Tensor, case: LayerCase) -> Tensor:
    """A copy with the data type and on the device of a case."""
    return tensor.to(case.dtype).clone().to(case.device)


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
