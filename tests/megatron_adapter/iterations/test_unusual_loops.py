"""Loops that are correct in stock Megatron and unusual, and those that get one line of error instead."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.training_preload import run_megatron_ranks

from . import host_loops
from .host_loops import Host, Trained, swift
from .test_host_loops import FSSDP, MOVING, assert_equal, assert_equal_gradients


def late_reset(host: Host, iteration: int) -> None:
    """Gradients are set to zero between the first forward pass and its backward pass."""
    from megatron.core.distributed import finalize_model_grads

    loss = host.forward()
    host.reset()
    loss.backward()
    more = host.forward()
    more.backward()
    finalize_model_grads([host.model])
    host.step(float(loss) + float(more))


def first_forward_alone(host: Host, iteration: int) -> None:
    """A forward pass without a backward pass, in training mode, before gradients are set to zero."""
    host.forward()
    swift(host, iteration)


def reading(host: Host, iteration: int) -> None:
    """Nothing finalizes gradients, which the loop reads itself after each of two calls of the schedule."""
    host.reset()
    host.config.finalize_model_grads_func = None
    loss = host.passes(1 + iteration % 2)
    host.found.gradients.append(host.gradients())
    host.step(loss + host.passes(2))


def own_finalize(host: Host, iteration: int) -> None:
    """A function of the loop's own changes gradients before DDP reduces them."""
    from megatron.core.distributed import finalize_model_grads

    def finalize(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
        halve(host)
        finalize_model_grads(chunks, *args, **kwargs)

    host.config.finalize_model_grads_func = finalize
    swift(host, iteration)


def halving(host: Host, iteration: int) -> None:
    """No schedule; gradients are changed after backward passes, in one iteration after each."""
    from megatron.core.distributed import finalize_model_grads

    host.reset()
    loss = 0.0
    for number in range(2):
        of_batch = host.forward()
        of_batch.backward()
        loss += float(of_batch)
        if number or iteration == 2:
            halve(host)
    finalize_model_grads([host.model])
    host.step(loss)


def crossed(host: Host, iteration: int) -> None:
    """Two forward passes before their backward passes, in the same order, without a schedule."""
    from megatron.core.distributed import finalize_model_grads

    host.reset()
    losses = [host.forward(), host.forward()]
    for loss in losses:
        loss.backward()
    finalize_model_grads([host.model])
    host.step(float(sum(losses)))


def averaged(host: Host, iteration: int) -> None:
    """In the middle of an iteration, other weights are evaluated in the place of the model's."""
    host.reset()
    loss = host.passes(1)
    own = [parameter.clone() for parameter in host.gpt.parameters()]
    write(host, [0.7 * one for one in own])
    host.log_probabilities()
    write(host, own)
    host.model.zero_grad_buffer()
    host.step(loss + host.passes(2))


def in_chunks(host: Host, iteration: int) -> None:
    """Between two calls of the schedule, a reference is evaluated, and in one iteration its weights stay."""
    host.reset()
    host.config.finalize_model_grads_func = None
    loss = host.passes(2)
    own = [parameter.clone() for parameter in host.gpt.parameters()]
    write(host, [0.7 * one for one in own])
    host.log_probabilities()
    if iteration != 2:
        write(host, own)
    host.step(loss + host.passes(1))


def in_parts(host: Host, iteration: int) -> None:
    """The loop clips gradients by itself, between two parts of the optimizer's step."""
    host.reset()
    host.found.losses.append(host.passes())
    host.found.gradients.append(host.gradients())
    assert not host.optimizer.prepare_grads()
    host.found.norms.append(float(host.optimizer.clip_grad_norm(0.5)))
    assert host.optimizer.step_with_ready_grads()


def in_eval_mode(host: Host, iteration: int) -> None:
    """In every other iteration, the model is in eval mode when a schedule trains it."""
    host.model.train(iteration % 2 == 0)
    swift(host, iteration)


def by_hand_in_eval_mode(host: Host) -> None:
    """Nothing says that this trains, until gradients are reduced."""
    from megatron.core.distributed import finalize_model_grads

    host.reset()
    host.model.eval()
    loss = host.forward()
    loss.backward()
    finalize_model_grads([host.model])
    host.step(float(loss))


@torch.no_grad()
def write(host: Host, weights: list[torch.Tensor]) -> None:
    for parameter, values in zip(host.gpt.parameters(), weights, strict=True):
        parameter.copy_(values)


def halve(host: Host) -> None:
    for parameter in host.model.parameters():
        parameter.main_grad.mul_(0.5)
    host.found.gradients.append(host.gradients())


def trained(strategy: tuple[str, dict[str, Any]], loop: Callable[[Host, int], None]) -> tuple[Trained, Any]:
    import megatron_fssdp

    attachment = megatron_fssdp.attach(*strategy)
    host = Host()
    host.model.train()
    for iteration in range(4):
        loop(host, iteration)
    return host.found, attachment.models[0].session


def train_unusually(rank: int, world_size: int) -> list[tuple[Trained, Trained, list[int], bool]]:
    results = []
    quota, flexmoe = ("quota", {"slots": 2}), ("flexmoe", {})
    for loop, *others in (
        *((late_reset, quota), (first_forward_alone,), (reading, flexmoe), (own_finalize,), (in_parts,)),
        *((halving, quota, flexmoe), (crossed, quota, flexmoe), (averaged, quota), (in_chunks, quota)),
        (in_eval_mode, flexmoe),
    ):
        stock, _ = trained(("none", {}), loop)
        # Weights are written while Parameters have the experts that their names mean.
        for strategy in (FSSDP if loop in (averaged, in_chunks) else MOVING, *others):
            found, session = trained(strategy, loop)
            known = [len(layer.history) for layer in session.runtime.layers]
            stays = session.slots.owners.is_even and strategy is MOVING
            results.append((found, stock, known, stays))
    return results


def test_unusual_loops_train_as_stock_megatron():
    ranks = run_megatron_ranks(train_unusually, 2, ep=2)
    for of_ranks in zip(*ranks, strict=True):
        found, stock = ([one[which] for one in of_ranks] for which in (0, 1))
        assert_equal_gradients(found, stock, "unusual")
    for of_rank in ranks:
        for found, stock, known, _ in of_rank:
            assert_equal(found, stock, "unusual")
            assert min(known) > 0
        assert not any(stays for *_, stays in of_rank)


SERVED = {"frozen model", "home between iterations", "copy at home", "reference at home"}
REFUSED = {
    "state_dict": "restore_owners",
    "load_state_dict": "reshard_interval=0",
    "home in an iteration": "in the middle of an iteration",
    "gradients while experts move": "zero_grad_buffer()",
    "fssdp in eval mode": "passes in training mode",
    "flexmoe in eval mode": "resident replicas have none",
    "reference of residents": "resident replicas: got weights of experts that were written",
    "reference while away": "re-sharding: got weights of experts that were written",
    "weights in an iteration": "written in the middle of an iteration",
    "parts of a step": "step_with_ready_grads()",
    "other optimizer": "got the optimizer OtherAdam, wanted AdamW",
    "adapter": "LoRA",
    "other strategy": "none on rank 0 and fssdp on rank 1",
}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What each case says, or nothing."""
    from megatron.core.distributed import DistributedDataParallel

    import megatron_fssdp
    from megatron_fssdp.config.errors import ConfigurationError

    said: dict[str, str] = {}

    def note(case: str, call: Callable[..., object], *arguments: object) -> None:
        said[case] = ""
        try:
            call(*arguments)
        except ConfigurationError as error:
            said[case] = str(error)

    def host_of(strategy: tuple[str, dict[str, Any]], num_iterations: int) -> Host:
        megatron_fssdp.attach(*strategy)
        host = Host()
        host.model.train()
        for iteration in range(num_iterations):
            swift(host, iteration)
        return host

    plain = host_of(("none", {}), 0)
    host = host_of(MOVING, 4)
    for iteration in range(4):  # A model that was wrapped under ``none`` goes on as Megatron's own.
        swift(plain, iteration)
    assert plain.found.losses == pytest.approx(host.found.losses)
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
    host = host_of(MOVING, 4)
    write(host, [0.9 * parameter for parameter in host.gpt.parameters()])
    note("reference while away", host.log_probabilities)
    megatron_fssdp.restore_owners(host.model)
    note("reference at home", host_loops.slime, host, 4)
    host.forward().backward()
    write(host, [2 * parameter for parameter in host.gpt.parameters()])
    note("weights in an iteration", host.forward)
    host = host_of(("flexmoe", {"placement_interval": 1, "window": 1}), 4)
    note("flexmoe in eval mode", by_hand_in_eval_mode, host)
    note("reference of residents", host_loops.slime, host, 4)
    note("parts of a step", in_parts, Host(), 0)
    host = Host()
    other = type("OtherAdam", (torch.optim.AdamW,), {})  # as slime may build
    for member in getattr(host.optimizer, "chained_optimizers", [host.optimizer]):
        member.optimizer.__class__ = other
    note("other optimizer", host.passes)
    wrapped = host_loops.build(host_loops.config())
    for layer in wrapped.decoder.layers:
        for expert in layer.mlp.experts.local_experts:
            expert.linear_fc1.adapter = torch.nn.Linear(2, 2)
    host_loops.build = lambda config: wrapped  # type: ignore[assignment]
    note("adapter", Host)
    megatron_fssdp.attach(*(FSSDP if rank else ("none", {})))
    note("other strategy", Host)
    return said


def test_what_cannot_be_served_is_one_line():
    for *early, kept, moving, resident, written, parts, adam, adapted, other in run_megatron_ranks(
        refusals, 2, ep=2
    ):
        *copies, middle, frozen, in_iteration, between, home = early[:7]
        assert all("reshard_interval=0" in one and "restore_owners" in one for one in copies)
        assert "written in the middle of an iteration" in middle
        assert not frozen
        assert not between
        assert not home
        assert "in the middle of an iteration" in in_iteration
        assert "zero_grad_buffer()" in kept
        assert "passes in training mode" in moving
        assert "resident replicas have none" in resident
        assert "weights of experts that were written" in written
        assert "step_with_ready_grads()" in parts
        assert "got the optimizer OtherAdam, wanted AdamW" in adam
        assert "LoRA" in adapted
        assert "none on rank 0 and fssdp on rank 1" in other
