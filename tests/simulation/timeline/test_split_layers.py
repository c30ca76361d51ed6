"""Split transfers on the timeline (Pro-Prophet, §V-B, Fig. 9c), worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_fssdp.planning.cost.link_seconds import LinkTimes
from megatron_fssdp.simulation.timeline.iteration_timeline import IterationTimeline
from megatron_fssdp.simulation.timeline.layer_parts import LayerSeconds

NOTHING = LinkTimes(np.zeros(1), np.zeros(1))
# 3 s of attention, 2 s of experts, 5 s of transfers either way; rows travel for 1 s.
LAYER = LayerSeconds(
    before_layer_s=np.zeros(1),
    before_gate_s=np.full(1, 3.0),
    counts_s=0.0,
    dispatch=LinkTimes(np.ones(1), np.zeros(1)),
    combine=LinkTimes(np.ones(1), np.zeros(1)),
    experts_s=np.full(1, 2.0),
    gather=LinkTimes(np.full(1, 5.0), np.zeros(1)),
    addition_s=np.zeros(1),
    reduce_s=np.full(1, 10.0),
    regather=NOTHING,
    is_ahead=np.ones(1, bool),
    is_rematerialized=np.zeros(1, bool),
    is_each_pass=np.zeros(1, bool),
)
SPLIT = replace(LAYER, gather_early=np.full(1, 0.4), reduce_late=np.full(1, 0.4))


def run(first: LayerSeconds, second: LayerSeconds) -> IterationTimeline:
    timeline = IterationTimeline(1)
    timeline.forward("1", first, True, second)
    timeline.forward("2", second, True)
    timeline.backward("2", second, first, True)
    timeline.backward("1", first, None, True, second)
    return timeline


def test_two_spans_of_compute_hide_more_than_one() -> None:
    """Unsplit, each layer waits 5 - 3 s for weights and 10 - 6 s for gradients.

    Split, 2 s of the second layer's weights travel during the first layer's experts, and 4 s of its gradients
    during their backward pass, so that layer waits for nothing. The first layer waits as before, also for its
    gradients, which follow nothing else on the lane.
    """
    whole, split = run(LAYER, LAYER), run(LAYER, SPLIT)
    assert whole.parts_s["waiting for spAG"].tolist() == [2 + 2]
    assert whole.parts_s["waiting for spRS"].tolist() == [4 + 4]
    assert split.parts_s["waiting for spAG"].tolist() == [2]
    assert split.parts_s["waiting for spRS"].tolist() == [4]
    assert (whole.now_s - split.now_s).tolist() == [2 + 4]


def test_splitting_keeps_the_total_transfer_time() -> None:
    spans: list[tuple[str, float]] = []
    for second in (LAYER, SPLIT):
        timeline = IterationTimeline(
            1, lambda lane, name, begin_s, end_s: spans.append((name, float((end_s - begin_s)[0])))
        )
        timeline.forward("1", LAYER, True, second)
        timeline.forward("2", second, True)
        timeline.backward("2", second, LAYER, True)
        timeline.backward("1", LAYER, None, True, second)
        assert sum(seconds for name, seconds in spans if name.startswith("sp")) == pytest.approx(2 * 15)
        spans.clear()
