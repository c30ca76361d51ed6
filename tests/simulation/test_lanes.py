from dataclasses import replace

import numpy as np
import pytest

from megatron_fssdp.planning.cost.link_seconds import LinkTimes, SteppedExchange
from megatron_fssdp.simulation.lanes import Lanes
from megatron_fssdp.simulation.layer_record import IterationRecord, LayerRecord

NOBODY = np.zeros(0, np.int32)
ROWS = LinkTimes(1.0, 0.0)
# 3 s of attention, 2 s of experts, 5 s of spAG, 10 s of spRS; rows travel for 1 s.
LAYER = LayerRecord(
    tokens_D=NOBODY,
    before_gate_s=3.0,
    dispatch=ROWS,
    combine=ROWS,
    experts_s=2.0,
    gather_s=5.0,
    reduce_s=10.0,
)
SPLIT = replace(LAYER, early=0.4)


def run(*layers):
    spans = []
    record = IterationRecord(micro_batches=[list(layers)])
    return Lanes(lambda *span: spans.append(span)).run_iteration(record), spans


def test_experts_in_steps_wait_for_replicas():
    """Replicas arrive at 5 s. The first rows need 1 s, so the exchange begins at 4 s."""
    rows = LinkTimes(1.0, 6.0)
    steps = SteppedExchange(3, between_nodes=True)
    layer = LayerRecord(
        tokens_D=NOBODY, dispatch=rows, combine=rows, experts_s=6.0, steps=steps, gather_s=5.0
    )
    lanes, spans = run(layer)
    assert lanes.parts_s["waiting for spAG"] == 4
    assert lanes.now_s == 4 + 14 + 16
    begins = {name: begin_s for _, name, begin_s, _ in spans}
    assert begins["exchange in steps layer 1"] == 4
    assert begins["experts layer 1"] == 5


def test_two_spans_of_compute_hide_more_of_a_split_transfer_than_one():
    """Pro-Prophet, §V-B, Fig. 9c, for weights. Unsplit, each layer waits 5 - 3 s for them.

    Split, 2 s of the second layer's weights travel during the first layer's experts, so that layer waits for
    nothing. The lane is as long in use, and gradients travel in one part.
    """
    (whole, whole_spans), (split, split_spans) = run(LAYER, LAYER), run(LAYER, SPLIT)
    assert whole.parts_s["waiting for spAG"] == 2 + 2
    assert split.parts_s["waiting for spAG"] == 2
    assert whole.parts_s["waiting for spRS"] == split.parts_s["waiting for spRS"] == 4 + 4
    assert whole.now_s - split.now_s == 2
    for spans in (whole_spans, split_spans):
        moved_s = sum(end_s - begin_s for lane, _, begin_s, end_s in spans if lane == "transfer")
        assert moved_s == pytest.approx(2 * 15)
