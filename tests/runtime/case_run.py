"""The layers of a case on one rank, iteration by iteration, compared with the reference.

Shape letters: T tokens of all ranks, M model dimension, E experts, D devices, L layers.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.runtime.slots.autograd_points import in_backward

from .drawn_placements import DrawnPlacements, strategy_of
from .layer_case import FFN_DIM, MODEL_DIM, draw_inputs
from .rank_layer import RankLayer
from .reference_layer import draw_weights, reference_forward

STEP_SIZE = 0.05


@dataclass
class CaseResult:
    """The findings of one rank; errors are relative to the largest value of their quantity."""

    errors: dict[str, float] = field(default_factory=dict)
    num_present: list[int] = field(default_factory=list)
    lives: set[ReplicaLife] = field(default_factory=set)

    def compare(self, name, got, wanted):
        """Record a difference; missing gradients count as zeros."""
        if wanted is None or not wanted.numel():
            return
        got = torch.zeros_like(wanted) if got is None else got.detach().cpu().to(wanted.dtype)
        assert got.shape == wanted.shape, f"{name}: {tuple(got.shape)} instead of {tuple(wanted.shape)}"
        scale = max(float(wanted.abs().max()), 1e-6)
        error = float((got - wanted).abs().max()) / scale
        self.errors[name] = max(self.errors.get(name, 0.0), error if error == error else float("inf"))


def compare_with_reference(rank, world_size, cases):
    results = {}
    if cases[0].device == "cpu":  # non-reentrant checkpoints run outside of the patches for CPU ranks
        torch.cuda.current_device = lambda: torch.device("cpu")
    for case in cases:
        try:
            results[case.name] = CaseRun(case).run()
        except Exception as error:
            raise RuntimeError(f"case {case.name} on rank {rank}: {error}") from error
    return results


class CaseRun:
    """The layers of a case on this rank, and the reference's weights."""

    def __init__(self, case, strategy_of=strategy_of, **options):
        self.case, self.rank, self.world_size = case, dist.get_rank(), dist.get_world_size()
        self.rng, self.result = np.random.default_rng(case.seed), CaseResult()
        self.strategy = strategy_of(case)
        self.runtime = MoERuntime(self.strategy, **{"measure": True, "check_plans": True, **options})
        self.layers = [self._layer(number) for number in range(1, case.num_layers + 1)]

    def _layer(self, number):
        drawn = draw_weights(self.case.seed + number, self.case.num_experts, MODEL_DIM, FFN_DIM)
        weights = [[t.to(self.case.dtype).double().requires_grad_() for t in tensors] for tensors in drawn]
        return RankLayer(self.case, number, weights, self.runtime)

    def draw(self):
        return draw_inputs(self.case, self.world_size, self.rng)

    def end(self):
        """End an iteration behind its passes; the loads of all layers."""
        self.runtime.finish_gradients()
        self.runtime.end_passes()
        return self.runtime.end_iteration()

    def run(self):
        case, runtime = self.case, self.runtime
        for iteration in range(case.num_iterations):
            batches = [self.draw() for _ in range(case.schedule.count("F"))]
            self._change_owners(iteration)
            for attempt in range(1 + case.repeats):
                runtime.reset_gradients()  # Transfers on their way end by adding to gradients.
                for layer in self.layers:
                    layer.zero_gradients()
                if case.driven:  # How many passes come is a hint, which may be wrong.
                    runtime.begin_iteration(case.announced or len(batches), iteration)
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
                if letter in "EO":
                    self._evaluate(letter)
            self._step()
        return self.result

    def _change_owners(self, iteration):
        for layer in self.layers:
            if self.case.moves:
                layer.move(self.rng.integers(0, layer.groups.num_devices, self.case.num_experts))
            if self.case.life is ReplicaLife.RESIDENT:
                assert isinstance(self.strategy, DrawnPlacements)
                layer.keep(self.strategy, iteration)
            layer.used.clear()

    def forward(self, batch):
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
            arguments = (output, probs, batch.of_rank(whole_map, self.rank).to(case.device))
            if case.recompute is None:
                added = layer.forward(*arguments)
            else:
                added = checkpoint(
                    layer.forward,
                    *arguments,
                    use_reentrant=case.recompute == "reentrant",
                    preserve_rng_state=False,
                )
            layer.slots.groups.advance_transfers()
            output = output + added
        return output, hidden, probs_L

    def run_passes(self, schedule, batches):
        """Run passes in an order; return output, hidden states and probabilities of each micro-batch."""
        passes = []
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
            elif step == "e":
                self._evaluate(step)
        return passes

    def _evaluate(self, letter):
        batch, is_marked = self.draw(), self.case.driven and letter != "O"
        num_seen = [layer.slots.history.num_seen for layer in self.layers]
        with ExitStack() as around:
            if is_marked:
                around.enter_context(self.runtime.evaluation())
            around.enter_context(torch.inference_mode() if self.rng.random() < 0.5 else torch.no_grad())
            output, *_ = self.forward(batch)
            wanted = batch.of_rank(self._reference(batch)[0].detach(), self.rank)
            self.result.compare("evaluation", output, wanted)
        if is_marked:
            assert letter == "e" or not any(layer.slots.local.load.counts_DE.any() for layer in self.layers)
        assert [layer.slots.history.num_seen for layer in self.layers] == num_seen

    def _reference(self, batch):
        hidden = batch.hidden.clone().requires_grad_(torch.is_grad_enabled())
        probs_L = [probs.clone().requires_grad_(torch.is_grad_enabled()) for probs in batch.probs_L]
        output = hidden
        for layer, probs, routing_map in zip(self.layers, probs_L, batch.map_L, strict=True):
            output = output + reference_forward(output, probs, routing_map, layer.weights)
        return output, hidden, probs_L

    def _compare(self, batches, passes):
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
                    shard = layer.shard([want, want])[i]
                    result.compare(f"parameter {i} gradient", gradient, shard)
            for slot_pass in layer.used:
                result.num_present.append(len(slot_pass.plan.placement.experts_on(layer.groups.device)))
                if slot_pass.plan.placement.num_replicas:
                    result.lives.add(slot_pass.plan.life)

    def counts_DE(self, map_TE, batch):
        """Tokens by source and expert, of ranks that share experts together."""
        counts_DE = np.zeros((self.layers[0].groups.num_devices, self.case.num_experts), np.int64)
        for rank in range(self.world_size):
            counts_DE[rank // self.case.peers] += batch.of_rank(map_TE, rank).numpy().sum(axis=0)
        return counts_DE

    def _check_loads(self, loads, batches):
        """Every rank has the counts of all; the first device also has loads and histograms."""
        num_devices = self.layers[0].groups.num_devices
        for number, load in enumerate(loads):
            counts_DE = sum(self.counts_DE(batch.map_L[number], batch) for batch in batches)
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

    def _step(self):
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
