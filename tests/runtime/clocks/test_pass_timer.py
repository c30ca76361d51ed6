from dataclasses import astuple, replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_fssdp.collectives.transfer_lanes import TransferTimer
from megatron_fssdp.runtime.clocks.pass_timer import PassSeconds, PassTimer


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, clock, seconds, x):
        ctx.clock, ctx.seconds = clock, seconds
        clock.now_s += seconds
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        ctx.clock.now_s += 2 * ctx.seconds
        return None, None, gradients[0]


class Layer:
    """A layer with a gate, whose gradient reaches the hidden states beside that of the dispatch."""

    def __init__(self, timer, clock):
        self.timer, self.clock = timer, clock
        self.seconds = PassSeconds(), PassSeconds()

    def __call__(self, x):
        self.timer.border(self.seconds, x, "other", None)
        x = _Work.apply(self.clock, 1.0, x)
        probs = _Work.apply(self.clock, 0.5, x)
        own = x.reshape(-1)
        self.timer.border(self.seconds, own, "dispatch", "other")
        rows = _Work.apply(self.clock, 2.0, own)
        with self.timer.waiting():
            self.clock.now_s += 64.0
        rows = _Work.apply(self.clock, 0.25, rows)
        self.timer.border(self.seconds, rows, "experts", "dispatch")
        rows = _Work.apply(self.clock, 4.0, rows)
        self.timer.border(self.seconds, rows, "combine", "experts")
        rows = _Work.apply(self.clock, 8.0, rows)
        output = (rows * probs.reshape(-1)).view(x.shape)
        self.timer.border(self.seconds, output, None, "combine")
        return output


FORWARD = PassSeconds(1.5, 2.25, 4.0, 8.0, 4.0)
BACKWARD = PassSeconds(3.0, 4.5, 8.0, 16.0, 8.0)


def test_every_part_gets_its_seconds_in_both_passes(clock):
    timer = PassTimer()
    layers = [Layer(timer, clock) for _ in range(2)]
    timer.start()
    x = torch.ones(3, requires_grad=True)
    for layer in layers:
        x = _Work.apply(clock, 32.0, layer(x))  # work between the layers belongs to none of them
    x.sum().backward()
    clock.now_s += 128.0  # the optimizer
    timer.stop()
    for layer in layers:
        assert layer.seconds == (FORWARD, BACKWARD)


def test_seconds_of_a_gather_beside_a_dispatch_are_the_gather_s(clock):
    """The dispatch begins after 1.5 s. It takes 2 s before a wait of 64 s and 0.25 s behind it."""
    timer, begin_s = PassTimer(), clock.now_s
    layer, other_layer = Layer(timer, clock), Layer(timer, clock)
    timer.start()
    for module in (layer, other_layer):
        module(torch.ones(3, requires_grad=True)).sum().backward()
    timer.stop()
    gather = TransferTimer(True, 0, begin_s + 0.5, begin_s + 2.5)
    assert timer.take_from_dispatch(layer.seconds[0], gather) == 1.0
    assert layer.seconds == (replace(FORWARD, dispatch_s=1.25), BACKWARD)
    assert timer.take_from_dispatch(layer.seconds[1], gather) == 0.0
    assert timer.take_from_dispatch(other_layer.seconds[0], gather) == 0.0
    assert other_layer.seconds == (FORWARD, BACKWARD)


def test_micro_batches_add_up_and_an_iteration_that_starts_again_does_not(clock):
    timer = PassTimer()
    layer = Layer(timer, clock)
    for _ in range(2):
        timer.start()
        for _ in range(3):
            layer(torch.ones(3, requires_grad=True)).sum().backward()
    timer.stop()
    assert [astuple(pass_seconds) for pass_seconds in layer.seconds] == [
        tuple(3 * seconds for seconds in astuple(of_pass)) for of_pass in (FORWARD, BACKWARD)
    ]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_pass_is_a_part_of_the_backward_pass(use_reentrant, clock):
    timer = PassTimer()
    layer = Layer(timer, clock)
    timer.start()
    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    timer.stop()
    forward, backward = layer.seconds
    assert forward == FORWARD
    if use_reentrant:
        assert backward == PassSeconds(
            *(a + b for a, b in zip(astuple(FORWARD), astuple(BACKWARD), strict=True))
        )
    else:  # the recomputation stops where the last saved tensor is known, so its combine may be shorter
        assert (backward.other_s, backward.experts_s) == (4.5, 12.0)


def test_ranks_are_combined_by_means_and_the_slowest_experts():
    combined = PassSeconds.combined([PassSeconds(1, 2, 3, 4, 3), PassSeconds(3, 4, 7, 0, 7)])
    assert combined == PassSeconds(2, 3, 5, 2, 7)
    assert combined.is_measured
    assert not PassSeconds().is_measured
