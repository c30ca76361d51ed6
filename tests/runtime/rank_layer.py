"""One rank's layers on the runtime: Megatron's dispatcher, plain experts; compared with the reference.

Shape letters: T tokens of this rank, M model dimension, E experts, D devices, P slots of a device.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.runtime.layers.slot_pass import SlotPass
from megatron_fssdp.runtime.slots.autograd_points import in_backward
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.testing.ranks import DEFAULT_PRELOAD, run_ranks
from tests.support.measured_profile import CHEAP_TO_MOVE as PROFILE
from tests.support.virtual_cuda import FindingKind, VirtualDevice, virtual_cuda
from tests.support.virtual_cuda.programs.known_findings import explained

from .drawn_placements import DrawnPlacements, strategy_of
from .layer_case import FFN_DIM, MODEL_DIM, Inputs, LayerCase, draw_inputs
from .reference_layer import draw_weights, reference_forward

DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
CPU_PRELOAD = (*DEFAULT_PRELOAD, "megatron_fssdp.megatron_adapter.cpu.cpu_runtime:install", DISPATCHER)
VIRTUAL_PRELOAD = (*DEFAULT_PRELOAD, DISPATCHER)
STEP_SIZE = 0.05


def run_layer_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, **more: Any) -> list[Any]:
    """Call a function on CPU ranks on which Megatron's dispatcher works."""
    return run_ranks(function, world_size, *arguments, preload=CPU_PRELOAD, **more)


@cache
def rank_groups(peers: int, overlaps: bool, one_queue: bool, num_nodes: int) -> tuple[ExpertGroups, Any]:
    """This rank's groups, for the runtime and for Megatron; consecutive ranks share experts."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    world_size, rank = dist.get_world_size(), dist.get_rank()

    def row() -> Any:
        return [dist.new_group(list(range(peer, world_size, peers))) for peer in range(peers)][rank % peers]

    columns = [dist.new_group(list(range(d, d + peers))) for d in range(0, world_size, peers)]
    everyone, column, alone = dist.group.WORLD, columns[rank // peers], dist.new_subgroups(1)[0]
    rows = row()
    groups = ExpertGroups(
        rows,
        Topology.uniform(world_size // peers, num_nodes),
        row() if overlaps else None,
        column if peers > 1 else None,
        everyone,
        one_queue,
    )
    megatron = ProcessGroupCollection()
    megatron.ep, megatron.tp_ep, megatron.tp, megatron.expt_tp = rows, everyone, alone, column
    return groups, megatron


@contextmanager
def virtual_rank(case: LayerCase) -> Iterator[VirtualDevice]:
    """A virtual CUDA device for a case; groups exist before it, and Megatron's stream belongs to it."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    rank_groups(case.peers, case.overlaps, case.one_queue, case.num_nodes)
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None
    with virtual_cuda() as device:
        yield device


def unknown_findings(device: VirtualDevice) -> list[str]:
    """Findings of a device but for the known ones in Megatron's own code.

    On a rank without rows, autograd itself makes the gradient of the probabilities. It makes it on the CPU,
    whose tensors pose as CUDA tensors here.
    """
    place = "megatron/core/tensor_parallel/mappings.py"
    findings = [
        finding
        for finding in explained(device.findings)[0]
        if not (finding.kind is FindingKind.NCCL_CPU and finding.place.startswith(place))
    ]
    return [str(finding) for finding in findings]


class RankLayer:
    """One layer, driven as Megatron's layer drives it.

    Attributes:
        slots: The product's layer.
        used: Passes that came into use, in order.
    """

    def __init__(self, case: LayerCase, number: int, weights: list[list[Tensor]], runtime: MoERuntime):
        self.case, self.weights, self.used = case, weights, list[SlotPass]()
        self.groups, self._megatron = rank_groups(case.peers, case.overlaps, case.one_queue, case.num_nodes)
        num_devices = self.groups.num_devices
        owner_E = even_owners(case.num_experts, num_devices)
        profile = PROFILE if case.placement in STRATEGIES else None
        self.parameters = self._own(owner_E)
        self.slots = runtime.add_layer(
            LayerContext(number, owner_E, self.groups.topology, profile),
            self.groups,
            self.parameters,
            layout=self._layout(),
            await_parameters=self.arrive if case.late else None,
        )
        self.slots.on_pass = self._bind
        self._dispatchers: dict[int, Any] = {}
        self._arriving: list[tuple[torch.nn.Parameter, Tensor]] = []
        if case.owners is not None:  # Megatron starts with even owners.
            self.move(np.array(case.owners))

    def shard(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of an expert's fc1 and fc2."""
        peers, peer = self.case.peers, self.groups.peer
        return [tensor.chunk(peers, dim=i)[peer] for i, tensor in enumerate(tensors)]

    def _layout(self) -> ExpertLayout:
        return ExpertLayout.of([tensor.to(self.case.dtype) for tensor in self.shard(self.weights[0])])

    def make(self, expert: int) -> list[torch.nn.Parameter]:
        """Parameters with the values of the reference's expert."""
        made = []
        for i, tensor in enumerate(self.shard(self.weights[expert])):
            copy = tensor.detach().to(self.case.dtype).clone().to(self.case.device)
            parameter: Any = torch.nn.Parameter(copy, requires_grad=i not in self.case.frozen)
            if self.case.has_main_grad and parameter.requires_grad:
                parameter.main_grad = torch.zeros_like(
                    copy, dtype=torch.promote_types(copy.dtype, torch.float32)
                )
                parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
            made.append(parameter)
        return made

    def _own(self, owner_E: np.ndarray) -> dict[int, list[torch.nn.Parameter]]:
        return {int(e): self.make(e) for e in np.flatnonzero(owner_E == self.groups.device)}

    def move(self, owner_E: np.ndarray) -> None:
        """Change the owners."""
        self.parameters = self._own(owner_E)
        self.slots.own(owner_E, self.parameters, self._layout())

    def keep(self, strategy: DrawnPlacements, number: int) -> None:
        """Change the resident replicas to a drawn placement."""
        context = self.slots.context
        placement = strategy.drawn(context, number).placement
        own = {e: p for e, p in self.parameters.items() if context.owner_E[e] == self.groups.device}
        replicas = {e: self.make(e) for e in placement.experts_on(self.groups.device) if e not in own}
        self.parameters = {**own, **replicas}
        self.slots.keep(placement, replicas)

    def leave(self) -> None:
        """Take the Parameters' values away until :meth:`arrive`, which makes every early read visible."""
        all_parameters = [p for tensors in self.parameters.values() for p in tensors]
        self._arriving = [(p, p.detach().clone()) for p in all_parameters]
        for parameter in all_parameters:
            parameter.data.fill_(torch.nan)

    def arrive(self) -> None:
        """Bring the values of the last optimizer step."""
        for parameter, value in self._arriving:
            parameter.data.copy_(value)
        self._arriving = []

    def _bind(self, one: SlotPass) -> None:
        self.used.append(one)
        num_slots = one.slots.slots_per_device
        if num_slots not in self._dispatchers:
            self._dispatchers[num_slots] = make_dispatcher(
                num_slots, self.groups, self._megatron, drops=self.case.routing == "dropped"
            )
        self._one, self._dispatcher = one, self._dispatchers[num_slots]

    def forward(self, hidden: Tensor, probs: Tensor, routing_map: Tensor, training: bool = True) -> Tensor:
        """The layer's forward pass, ``[T, M]``."""
        slots = self.slots
        slots.prepare(routing_map, training=training)
        dispatcher = self._dispatcher
        rows, row_probs = dispatcher.dispatch_preprocess(
            hidden.unsqueeze(1), *slots.remap(routing_map, probs)
        )
        rows, row_probs = dispatcher.token_dispatch(slots.enter_dispatch(rows), row_probs)
        slots.rows_travel()
        rows, rows_P, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        with slots.await_weights(rows):
            rows = _experts(rows, rows_P.tolist(), row_probs, self._one.parameters_U)
        rows = dispatcher.combine_preprocess(slots.leave_experts(rows))
        output = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
        return slots.finish(output.squeeze(1))

    def gradients(self) -> dict[tuple[int, int], Tensor | None]:
        """This rank's gradients by expert and tensor."""
        return {
            (expert, i): getattr(parameter, "main_grad", parameter.grad)
            for expert, tensors in self.parameters.items()
            for i, parameter in enumerate(tensors)
        }

    def zero_gradients(self) -> None:
        """As Megatron's ``zero_grad_buffer``."""
        for parameter in (p for tensors in self.parameters.values() for p in tensors):
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()


def make_dispatcher(num_slots: int, groups: ExpertGroups, megatron: Any, *, drops: bool = False) -> Any:
    """Megatron's all-to-all dispatcher for a number of slots of each device."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    with warnings.catch_warnings(action="ignore"):  # about every library that is not installed
        config = TransformerConfig(
            num_layers=1,
            hidden_size=MODEL_DIM,
            num_attention_heads=1,
            num_moe_experts=num_slots * groups.num_devices,
            moe_token_dispatcher_type="alltoall",
            add_bias_linear=False,
            moe_expert_capacity_factor=99.0 if drops else None,
        )
    first = groups.device * num_slots
    return MoEAlltoAllTokenDispatcher(num_slots, list(range(first, first + num_slots)), config, megatron)


def _experts(rows: Tensor, rows_P: Sequence[int], row_probs: Tensor, parameters_U: Sequence[Any]) -> Tensor:
    row_probs = row_probs.unsqueeze(1)
    used = [slot for slot, parameters in enumerate(parameters_U) if parameters is not None]
    rows_of_used = [rows_P[slot] for slot in used]
    assert sum(rows_of_used) == len(rows), "rows in an empty slot"
    if not used:  # The result depends on rows and probabilities in any case.
        return (rows * row_probs).to(rows.dtype)
    outputs = []
    for slot, x, prob in zip(used, rows.split(rows_of_used), row_probs.split(rows_of_used), strict=True):
        fc1, fc2 = parameters_U[slot]
        y = functional.linear(functional.gelu(functional.linear(x, fc1)), fc2)
        outputs.append((y * prob).to(y.dtype))
    return torch.cat(outputs)


def _add_to_main_grad(parameter: Any) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


@dataclass
class CaseResult:
    """The findings of one rank.

    Attributes:
        errors: Largest difference from the reference by quantity, relative to its largest value.
        num_replicas: Replicas of each iteration's plans.
        num_present: Experts on this device in each iteration's plans.
        lives: How long replicas of the plans live.
    """

    errors: dict[str, float] = field(default_factory=dict)
    num_replicas: list[int] = field(default_factory=list)
    num_present: list[int] = field(default_factory=list)
    lives: set[ReplicaLife] = field(default_factory=set)

    def compare(self, what: str, got: Tensor | None, wanted: Tensor | None) -> None:
        """Record a difference; missing gradients count as zeros."""
        if wanted is None or not wanted.numel():
            return
        got = torch.zeros_like(wanted) if got is None else got.detach().cpu().to(wanted.dtype)
        assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)} instead of {tuple(wanted.shape)}"
        scale = max(float(wanted.abs().max()), 1e-6)
        error = float((got - wanted).abs().max()) / scale
        self.errors[what] = max(self.errors.get(what, 0.0), error if error == error else float("inf"))


def compare_with_reference(rank: int, world_size: int, cases: Sequence[LayerCase]) -> dict[str, CaseResult]:
    """Run every case on this rank; return results by name of the case."""
    results = {}
    if cases[0].device == "cpu":  # non-reentrant checkpoints run outside of the patches for CPU ranks
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    for case in cases:
        try:
            results[case.name] = CaseRun(case).run()
        except Exception as error:
            raise RuntimeError(f"case {case.name} on rank {rank}: {error}") from error
    return results


class CaseRun:
    """The layers of a case on this rank, and the reference's weights.

    Attributes:
        runtime: The product's runtime.
        layers: The layers.
    """

    def __init__(self, case: LayerCase, **options: Any) -> None:
        self.case, self.rank, self.world_size = case, dist.get_rank(), dist.get_world_size()
        self.rng, self.result = np.random.default_rng(case.seed), CaseResult()
        self.strategy = strategy_of(case)
        self.runtime = MoERuntime(self.strategy, **{"measure": True, "check_plans": True, **options})
        self.layers = [self._layer(number) for number in range(1, case.num_layers + 1)]

    def _layer(self, number: int) -> RankLayer:
        drawn = draw_weights(self.case.seed + number, self.case.num_experts, MODEL_DIM, FFN_DIM)
        weights = [[t.to(self.case.dtype).double().requires_grad_() for t in tensors] for tensors in drawn]
        return RankLayer(self.case, number, weights, self.runtime)

    def draw(self) -> Inputs:
        """One more micro-batch."""
        return draw_inputs(self.case, self.world_size, self.rng)

    def run(self) -> CaseResult:
        """Run the iterations of the case, and compare each of them."""
        case, runtime = self.case, self.runtime
        for iteration in range(case.num_iterations):
            batches = [self.draw() for _ in range(case.schedule.count("F"))]
            self._change_owners(iteration)
            if case.driven:
                runtime.begin_iteration(len(batches), iteration)
            for attempt in range(1 + case.repeats):
                for layer in self.layers:
                    layer.zero_gradients()
                if case.driven:
                    runtime.begin_passes()
                if case.late and not attempt:
                    for layer in self.layers:
                        layer.leave()
                steps = case.schedule[: None if attempt == case.repeats else -1]
                leaves = self.run_passes(steps, batches)
            runtime.finish_gradients()
            self._compare(batches, leaves)
            if case.driven:
                runtime.end_passes()
                self._check_loads(runtime.end_iteration(), batches)
            for letter in case.schedule:
                if letter == "E":
                    self._evaluate()
            self._step()
        return self.result

    def _change_owners(self, iteration: int) -> None:
        for layer in self.layers:
            if self.case.moves:
                layer.move(self.rng.integers(0, layer.groups.num_devices, self.case.num_experts))
            if self.case.life is ReplicaLife.RESIDENT:
                assert isinstance(self.strategy, DrawnPlacements)
                layer.keep(self.strategy, iteration)
            layer.used.clear()

    def forward(self, batch: Inputs, training: bool = True) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The forward pass of all layers: output and leaves."""
        case = self.case
        hidden = batch.of_rank(batch.hidden, self.rank).to(case.device, case.dtype)
        hidden.requires_grad_("hidden" in case.inputs)
        probs_L = [batch.of_rank(probs, self.rank).to(case.device) for probs in batch.probs_L]
        probs_L = [p.to(torch.promote_types(case.dtype, torch.float32)) for p in probs_L]
        output = hidden
        if not in_backward():
            self.layers[0].slots.launch(hidden)
        for layer, probs, whole_map in zip(self.layers, probs_L, batch.map_L, strict=True):
            probs.requires_grad_("probs" in case.inputs)
            arguments = (output, probs, batch.of_rank(whole_map, self.rank).to(case.device), training)
            if case.recompute is None:
                added = layer.forward(*arguments)
            else:
                added = checkpoint(
                    layer.forward,
                    *arguments,
                    use_reentrant=case.recompute == "reentrant",
                    preserve_rng_state=False,
                )
            layer.slots.advance_transfers()
            output = output + added
        return output, hidden, probs_L

    def run_passes(
        self, schedule: str, batches: Sequence[Inputs]
    ) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
        """Run passes in an order; return output, hidden states and probabilities of each micro-batch."""
        passes: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        num_backward = 0
        for step in schedule:
            if step == "F":
                passes.append(self.forward(batches[len(passes)]))
            elif step == "B":
                batch, (output, *rest) = batches[num_backward], passes[num_backward]
                cotangent = batch.of_rank(batch.cotangent, self.rank).to(self.case.device, output.dtype)
                (output * cotangent).sum().backward()
                passes[num_backward] = (output.detach(), *rest)
                num_backward += 1
        return passes

    def _evaluate(self) -> None:
        batch = self.draw()
        if self.case.driven:
            self.runtime.begin_iteration(0)
        num_seen = [layer.slots.history.num_seen for layer in self.layers]
        with torch.inference_mode() if self.rng.random() < 0.5 else torch.no_grad():
            output, *_ = self.forward(batch, training=False)
            self.result.compare(
                "evaluation", output, batch.of_rank(self._reference(batch)[0].detach(), self.rank)
            )
        if self.case.driven:
            assert not any(load.counts_DE.any() for load in self.runtime.end_iteration())
        assert [layer.slots.history.num_seen for layer in self.layers] == num_seen

    def _reference(self, batch: Inputs) -> tuple[Tensor, Tensor, list[Tensor]]:
        hidden = batch.hidden.clone().requires_grad_(torch.is_grad_enabled())
        probs_L = [probs.clone().requires_grad_(torch.is_grad_enabled()) for probs in batch.probs_L]
        output = hidden
        for layer, probs, routing_map in zip(self.layers, probs_L, batch.map_L, strict=True):
            output = output + reference_forward(output, probs, routing_map, layer.weights)
        return output, hidden, probs_L

    def _compare(
        self, batches: Sequence[Inputs], passes: Sequence[tuple[Tensor, Tensor, list[Tensor]]]
    ) -> None:
        result, case = self.result, self.case
        for batch, (output, hidden, probs_L) in zip(batches, passes, strict=True):
            wanted, all_hidden, all_probs_L = self._reference(batch)
            (wanted * batch.cotangent).sum().backward()
            result.compare("output", output, batch.of_rank(wanted.detach(), self.rank))
            for name, got_L, wanted_L in (
                ("hidden", [hidden], [all_hidden]),
                ("probs", probs_L, all_probs_L),
            ):
                for got, want in zip(got_L, wanted_L, strict=True):
                    if name in case.inputs and want.grad is not None:
                        result.compare(f"{name} gradient", got.grad, batch.of_rank(want.grad, self.rank))
        for layer in self.layers:
            for (expert, i), gradient in layer.gradients().items():
                if i in case.frozen:
                    assert gradient is None
                elif (want := layer.weights[expert][i].grad) is not None:
                    shards: list[Any] = [None, None]
                    shards[i] = want
                    shard = layer.shard([want, want])[i]
                    result.compare(f"parameter {i} gradient", gradient, shard)
            for one in layer.used:
                result.num_replicas.append(one.plan.placement.num_replicas)
                result.num_present.append(len(one.plan.placement.experts_on(layer.groups.device)))
                if one.plan.placement.num_replicas:
                    result.lives.add(one.plan.life)

    def _check_loads(self, loads: Sequence[LayerLoad], batches: Sequence[Inputs]) -> None:
        """Every rank has the counts of all; the first device also has loads and histograms."""
        num_devices = self.layers[0].groups.num_devices
        for number, load in enumerate(loads):
            counts_DE = np.zeros((num_devices, self.case.num_experts), np.int64)
            for batch in batches:
                for rank in range(self.world_size):
                    routing_TE = batch.of_rank(batch.map_L[number], rank).numpy()
                    counts_DE[rank // self.case.peers] += routing_TE.sum(axis=0)
            assert np.array_equal(load.counts_DE, counts_DE)
            is_first = self.rank < self.case.peers
            assert load.device_D.sum() == load.owner_D.sum() == (counts_DE.sum() if is_first else 0)
            if not is_first:
                continue
            plain_E = even_owners(self.case.num_experts, num_devices)
            assert load.owner_D.tolist() == [counts_DE[:, plain_E == d].sum() for d in range(num_devices)]
            rows = [row for batch in batches for row in batch.map_L[number].numpy()]
            hit = [len(set(plain_E[row])) for row in rows]
            assert load.by_devices_D.tolist() == np.bincount(hit, minlength=num_devices + 1)[1:].tolist()

    def _step(self) -> None:
        with torch.no_grad():
            for layer in self.layers:
                for tensors in layer.weights:
                    for i, tensor in enumerate(tensors):
                        if tensor.grad is not None and i not in self.case.frozen:
                            tensor -= STEP_SIZE * tensor.grad
                            tensor.copy_(tensor.to(self.case.dtype))
                        tensor.grad = None
                for expert, parameters in layer.parameters.items():
                    for parameter, value in zip(parameters, layer.shard(layer.weights[expert]), strict=True):
                        parameter.copy_(value)
