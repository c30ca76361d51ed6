import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch

CPU = torch.device("cpu")


def measured(watch, clock, before_s, experts_s, num_rows):
    """One forward pass, with other work after both measured parts."""
    watch.layer_begins(CPU)
    clock.now_s += before_s
    watch.reach("dispatch", torch.empty(2, 2))
    clock.now_s += 16
    watch.reach("experts", torch.empty(num_rows, 2))
    clock.now_s += experts_s
    watch.reach("combine", torch.empty(num_rows, 2))
    clock.now_s += 32
    watch.reach(None, torch.empty(2, 2))


def test_non_expert_time_is_a_median_and_expert_time_is_a_sum(clock):
    watch = LayerStopwatch()
    for seconds in (0.25, 8.0, 0.5):  # the long pass is an outlier
        measured(watch, clock, seconds, seconds, 5)
    assert (watch.before_s(), watch.experts_s(), watch.num_rows) == (0.5, 8.75, 15)


def test_the_first_measured_iteration_is_cold_and_dropped(clock):
    watch = LayerStopwatch()
    watch.iteration_ends()  # an iteration without passes, as before the first one
    for _ in range(2):  # both micro-batches of the first iteration
        measured(watch, clock, 64.0, 128.0, 1000)
    watch.iteration_ends()
    assert (watch.before_s(), watch.experts_s(), watch.num_rows) == (64.0, 256.0, 2000), "nothing else yet"
    measured(watch, clock, 0.5, 0.25, 3)
    watch.iteration_ends()
    measured(watch, clock, 0.5, 0.5, 4)
    assert (watch.before_s(), watch.experts_s(), watch.num_rows) == (0.5, 0.75, 7)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_pass_is_not_counted(use_reentrant, clock):
    watch = LayerStopwatch()
    seconds = [(8.0, 8.0), (0.5, 0.25)]

    def forward(x):
        measured(watch, clock, *seconds.pop(), 7)
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(forward, x, use_reentrant=use_reentrant).sum().backward()
    assert not seconds
    assert (watch.before_s(), watch.experts_s(), watch.num_rows) == (0.5, 0.25, 7)
