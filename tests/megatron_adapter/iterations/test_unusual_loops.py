"""Loops that are correct in stock Megatron and unusual, and those that get one line of error instead."""

from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.moe.moe_layer import MoELayer

import megatron_fssdp
from megatron_fssdp.config.errors import ConfigurationError
from tests.support.training_preload import run_megatron_ranks

from ..training.parity.test_strategy_parity import cheap_links
from ..training_run import slow
from . import host_loops
from .host_loops import Host, assert_equal, swift, trained
from .test_host_loops import FSSDP, MOVING


def late_reset(host, iteration):
    """Gradients are set to zero between the first forward pass and its backward pass."""
    loss = host.forward()
    host.reset()
    loss.backward()
    more = host.forward()
    more.backward()
    host.finalize()
    host.step(float(loss) + float(more))


def reading(host, iteration):
    """Nothing finalizes gradients, which the loop reads itself after each of two calls of the schedule."""
    host.reset()
    host.config.finalize_model_grads_func = None
    loss = host.passes(1 + iteration % 2)
    host.results.gradients.append(host.gradients())
    host.step(loss + host.passes(2))


def own_finalize(host, iteration):
    """The loop changes gradients before DDP reduces them. A forward pass is left without a backward pass."""

    def finalize(chunks, *args, **kwargs):
        halve(host)
        finalize_model_grads(chunks, *args, **kwargs)

    host.config.finalize_model_grads_func = finalize
    host.forward()
    swift(host, iteration)


def halving(host, iteration):
    """No schedule; gradients are changed after backward passes, from the third iteration on after each."""
    halving_between(host, iteration, at_end=True)


def halving_between(host, iteration, at_end=False):
    """Gradients are changed between backward passes."""
    host.reset()
    loss = 0.0
    for number in range(3):
        of_batch = host.forward()
        of_batch.backward()
        loss += float(of_batch)
        if at_end if number == 2 else iteration >= 2:
            halve(host)
    host.finalize()
    host.step(loss)


def crossed(host, iteration):
    """Two forward passes before their backward passes, in the same order, without a schedule."""
    host.reset()
    losses = [host.forward(), host.forward()]
    for loss in losses:
        loss.backward()
    host.finalize()
    host.step(float(sum(losses)))


def averaged(host, iteration):
    """In the middle of an iteration, other weights are evaluated in the place of the model's."""
    host.reset()
    loss = host.passes(1)
    own = [parameter.clone() for parameter in host.gpt.parameters()]
    write(host, [0.7 * parameter for parameter in own])
    host.log_probabilities()
    write(host, own)
    host.model.zero_grad_buffer()
    host.step(loss + host.passes(2))


def in_chunks(host, iteration):
    """Between two calls of the schedule, a reference is evaluated, and in one iteration its weights stay."""
    host.reset()
    host.config.finalize_model_grads_func = None
    loss = host.passes(2)
    own = [parameter.clone() for parameter in host.gpt.parameters()]
    write(host, [0.7 * parameter for parameter in own])
    host.log_probabilities()
    if iteration != 2:
        write(host, own)
    host.step(loss + host.passes(1))


def in_parts(host, iteration):
    """The loop clips gradients by itself, between two parts of the optimizer's step."""
    host.reset()
    host.results.losses.append(host.passes())
    host.results.gradients.append(host.gradients())
    assert not host.optimizer.prepare_grads()
    host.results.norms.append(float(host.optimizer.clip_grad_norm(0.5)))
    assert host.optimizer.step_with_ready_grads()


def one_by_one(host, iteration):
    """The optimizers of dense Parameters and experts step one after the other."""
    host.reset()
    loss = host.passes()
    optimizer, host.optimizer = host.optimizer, SimpleNamespace(step=lambda: (True, 0.0, None))
    host.step(loss)
    host.optimizer = optimizer
    for member in optimizer.chained_optimizers:
        host.results.norms.append(float(member.step()[1]))


def in_eval_mode(host, iteration):
    """In every other iteration, the model is in eval mode when a schedule trains it."""
    host.model.train(iteration % 2 == 0)
    swift(host, iteration)


def by_hand_in_eval_mode(host):
    """Nothing says that this trains, until gradients are reduced."""
    host.reset()
    host.model.eval()
    loss = host.forward()
    loss.backward()
    host.finalize()
    host.step(float(loss))


@torch.no_grad()
def write(host, weights):
    for parameter, values in zip(host.gpt.parameters(), weights, strict=True):
        parameter.copy_(values)


class Adapter(torch.nn.Module):
    """A module around another one, as in LoRA."""

    def __init__(self, wrapped):
        super().__init__()
        self.to_wrap, self.scale = wrapped, torch.nn.Parameter(torch.ones(()))

    def forward(self, hidden, *rest, **named):
        return self.to_wrap(self.scale * hidden, *rest, **named)


def adapt_routers(gpt):
    gpt.requires_grad_(False)
    for layer in gpt.decoder.layers:
        layer.mlp.router = Adapter(layer.mlp.router)


def build_mixed(build, config):
    """A model whose second layer has half as many experts."""
    gpt, other = build(config), build(replace(config, num_moe_experts=config.num_moe_experts // 2))
    gpt.decoder.layers[1] = other.decoder.layers[1]
    return gpt


def train_adapters():
    adapt_routers(gpt := host_loops.build(host_loops.config()))
    with patch.object(host_loops, "build", lambda config: gpt):
        train_frozen(Host())


def train_late_adapters():
    """Adapters that come after DDP, as in AReaL, have no ``main_grad``."""
    host = Host(use_distributed_optimizer=False)
    adapt_routers(host.gpt)
    host.optimizer = new_optimizer(host)
    train_frozen(host)


def train_frozen(host):
    """An iteration of a host whose experts have no gradients."""
    host.reset()
    host.passes()
    assert host.optimizer.step()[0]


def experts_of_first(host):
    return next(host._layers()).experts


def new_optimizer(host):
    return get_megatron_optimizer(host.optimizer.config, [host.model], use_gloo_process_groups=True)


def halve(host):
    for parameter in host.model.parameters():
        parameter.main_grad.mul_(0.5)
    host.results.gradients.append(host.gradients())


RECORDING = ("none", {"record_dir": "unused"})
QUOTA, FLEXMOE = ("quota", {"slots": 2}), ("flexmoe", {"placement_interval": 1, "window": 1})
PLAIN = (late_reset, reading, own_finalize, in_parts, one_by_one, halving, in_eval_mode)
LOOPS = {loop: [MOVING] for loop in PLAIN} | {halving_between: [FLEXMOE], crossed: [MOVING, QUOTA]}
# Weights are written while Parameters have the experts that their names mean.
LOOPS |= {loop: [FSSDP] for loop in (averaged, in_chunks)}
MORE = {loop: [QUOTA] for loop in (late_reset, reading, halving, averaged, in_chunks)}
MORE |= {loop: [FLEXMOE] for loop in (crossed, in_eval_mode)}


def train_unusually(rank, world_size, table):
    """Stock Megatron's run, and that of each strategy, by loop."""
    cheap_links()
    return {
        # FlexMoE can have replicas from the fourth iteration on, and the next one shows their step.
        loop: [trained(strategy, loop, 3 + 2 * (FLEXMOE in others)) for strategy in (("none", {}), *others)]
        for loop, others in table.items()
    }


@pytest.mark.parametrize("table", [LOOPS, *slow([MORE])], ids=["loops", "more strategies"])
def test_unusual_loops_train_as_stock_megatron(table):
    ranks = run_megatron_ranks(train_unusually, 2, table, ep=2)
    for loop, strategies in table.items():
        of_ranks = [results[loop] for results in ranks]
        assert_equal(of_ranks, [f"{name}, {loop.__name__}" for name, _ in strategies])
        for strategy, *runs in zip(strategies, *(others for _, *others in of_ranks), strict=True):
            assert min(run.num_known for run in runs) > 0
            assert strategy is not MOVING or all(run.moved[-1] for run in runs)
            assert loop is not halving_between or all(run.replicas[-1] for run in runs)


HOME = {"home between iterations", "copy at home", "reference at home"}
SERVED = HOME | {"frozen model", "adapters", "adapters after DDP", "other numbers of experts at home"}
REFUSED = {
    "state_dict": "restore_owners",
    "load_state_dict": "reshard_interval=0",
    "home in an iteration": "in the middle of an iteration",
    "gradients while experts move": "zero_grad_buffer()",
    "fssdp in eval mode": "passes in training mode",
    "flexmoe in eval mode": "resident replicas have none",
    "changed gradients of residents": "gradients of experts that the loop has changed",
    "unreduced gradients of residents": "gradients that DDP has not reduced",
    "reference of residents": "resident replicas: got weights of experts that were written",
    "reference while away": "re-sharding: got weights of experts that were written",
    "weights in an iteration": "written in the middle of an iteration",
    "frozen while away": "or frozen outside of the optimizer, while",
    "frozen in an iteration of residents": "or frozen outside of the optimizer, wanted weights that only",
    "frozen where residents are": "or frozen outside of the optimizer, wanted weights that only",
    "states while away": "optimizer states by their positions",
    "states of residents": "loaded or frozen outside of the optimizer",
    "new optimizer": "optimizer that was built after the first iteration",
    "other dispatcher": "got a MoEAlltoAllTokenDispatcher that became its token dispatcher after DDP",
    "other experts": "got a Sequential in the place of the expert module",
    "tied experts": "tied weights",
    "gradients of few Parameters": "smart_schedule: got torch.autograd.grad()",
    "gradients of experts": "layer 1: got torch.autograd.grad()",
    "gradients of experts alone": "layer 1: got torch.autograd.grad()",
    "gradients of the step before": "layer 2: got main_grad in .grad",
    "parts of a step": "step_with_ready_grads()",
    "other optimizer": "got the optimizer OtherAdam, wanted AdamW",
    "adapter": "LoRA",
    "other numbers of experts": "got layers of 8 and 4 experts",
    "records of other numbers of experts": "layers [1, 2] of 4 and 8 experts",
    "records of layers without numbers": "layers [0, 0] of 8 experts",
    "other strategy": "none on rank 0 and fssdp on rank 1",
}


def refusals(rank, world_size):
    """What each case says, or nothing."""
    cheap_links()  # Else, on a busy machine, FlexMoE would have no replicas.
    said = {}

    def note(case, call, *arguments):
        said[case] = ""
        try:
            call(*arguments)
        except (ConfigurationError, RuntimeError) as error:
            said[case] = str(error)

    def host_of(strategy, num_iterations, **options):
        megatron_fssdp.attach(*strategy)
        host = Host(**options)
        host.model.train()
        for _ in range(num_iterations):
            host.reset()
            host.step(host.passes(3 if strategy is FLEXMOE else 1))
        return host

    plain = host_of(("none", {}), 0)
    host = host_of(MOVING, 3)
    for _ in range(3):  # A model that was wrapped under ``none`` goes on as Megatron's own.
        plain.reset()
        plain.step(plain.passes(1))
    assert plain.results.losses == pytest.approx(host.results.losses)
    # Copies by names, while experts are elsewhere.
    note("state_dict", host.model.state_dict)
    note("load_state_dict", partial(host.model.load_state_dict, strict=False), {})
    host.reset()
    gpt = host_loops.build(host.config).requires_grad_(False)
    frozen = DistributedDataParallel(host.config, host.model.ddp_config, gpt)
    note("frozen model", host.forward, frozen)  # with gradients, in training mode
    host.reset()
    loss = host.forward()
    host.reset()
    loss.backward()
    note("home in an iteration", megatron_fssdp.restore_owners, host.model)
    host.reset()
    note("home between iterations", megatron_fssdp.restore_owners, host.model)
    note("copy at home", partial(host.model.load_state_dict, strict=False), host.model.state_dict())
    assert not megatron_fssdp.restore_owners(host.model), "experts are home"
    while not said.get("gradients while experts move"):  # They are never set to zero.
        note("gradients while experts move", lambda: host.step(host.passes()))
    note("fssdp in eval mode", by_hand_in_eval_mode, host_of(MOVING, 2))
    host = host_of(MOVING, 3)
    write(host, [0.9 * parameter for parameter in host.gpt.parameters()])
    note("reference while away", host.log_probabilities)
    megatron_fssdp.restore_owners(host.model)
    note("reference at home", host_loops.slime, host, 4)
    host.forward().backward()
    write(host, [2 * parameter for parameter in host.gpt.parameters()])
    note("weights in an iteration", host.forward)
    note("adapters", train_adapters)
    note("adapters after DDP", train_late_adapters)
    host = host_of(FLEXMOE, 4)
    note("flexmoe in eval mode", by_hand_in_eval_mode, host)
    note("reference of residents", host_loops.slime, host, 4)
    note("parts of a step", in_parts, Host(), 0)
    note("changed gradients of residents", halving, host_of(FLEXMOE, 4), 4)
    note("unreduced gradients of residents", reading, host_of(FLEXMOE, 4), 4)
    host = Host()
    adam = type("OtherAdam", (torch.optim.AdamW,), {})  # as slime may build
    for member in getattr(host.optimizer, "chained_optimizers", [host.optimizer]):
        member.optimizer.__class__ = adam
    note("other optimizer", host.passes)
    whole = {"use_distributed_optimizer": False}
    host = host_of(FLEXMOE, 4, **whole)
    host.reset()
    host.forward()
    experts_of_first(host).requires_grad_(False)
    note("frozen in an iteration of residents", host.forward)
    note("frozen where residents are", swift, host, 4)
    experts_of_first(host).requires_grad_(True)
    host.optimizer.load_state_dict(host.optimizer.state_dict())
    note("states of residents", swift, host, 4)
    host = host_of(MOVING, 3, **whole)
    note("states while away", host.optimizer.state_dict)
    experts_of_first(host).requires_grad_(False)
    note("frozen while away", swift, host, 4)
    experts_of_first(host).requires_grad_(True)
    host.optimizer = new_optimizer(host)
    note("new optimizer", swift, host, 4)
    host, other_host = host_of(QUOTA, 1), host_of(QUOTA, 1)
    layer = next(host._layers())
    layer.experts = torch.nn.Sequential(layer.experts)
    note("other experts", host.passes)
    layer = next(other_host._layers())
    layer.token_dispatcher = copy(layer._dispatchers._built)
    note("other dispatcher", other_host.passes)
    with patch.object(host_loops, "build", partial(build_mixed, host_loops.build)):
        note("other numbers of experts", host_of, MOVING, 0)
        note("other numbers of experts at home", host_of, FSSDP, 2)
        note("records of other numbers of experts", host_of, RECORDING, 1)
    with patch.object(MoELayer, "set_layer_number"):  # as in a layer of several kinds of experts
        note("records of layers without numbers", host_of, RECORDING, 1)
    host = host_of(("fastermoe", {"smart_schedule": True}), 1)
    router = next(host._layers()).router.weight
    note("gradients of few Parameters", torch.autograd.grad, host.forward(), [router])
    host = host_of(FSSDP, 2)
    host.reset()
    torch.autograd.grad(host.forward(), [next(host._layers()).router.weight])
    experts = [*experts_of_first(host).parameters()]
    note("gradients of experts", torch.autograd.grad, host.forward(), experts)
    host.reset()
    note("gradients of experts alone", partial(host.forward().backward, inputs=experts))
    host = host_of(FSSDP, 1, **whole)
    host.model.zero_grad_buffer()
    note("gradients of the step before", host.passes)
    tied = host_loops.build(host_loops.config())
    first, second = (layer.mlp.experts.local_experts[0] for layer in tied.decoder.layers)
    second.linear_fc1.weight = first.linear_fc1.weight
    with patch.object(host_loops, "build", lambda config: tied):
        note("tied experts", Host)
    wrapped = host_loops.build(host_loops.config())
    for layer in wrapped.decoder.layers:
        for expert in layer.mlp.experts.local_experts:
            expert.linear_fc1.adapter = torch.nn.Linear(2, 2)
    host_loops.build = lambda config: wrapped
    note("adapter", Host)
    megatron_fssdp.attach(*(FSSDP if rank else ("none", {})))
    note("other strategy", Host)
    return said


def test_what_cannot_be_served_is_one_line():
    for said in run_megatron_ranks(refusals, 2, ep=2):
        assert said.keys() == SERVED | REFUSED.keys()
        for case, line in said.items():
            assert REFUSED.get(case, "") in line, case
            assert bool(line) == (case in REFUSED), case
            assert "\n" not in line
