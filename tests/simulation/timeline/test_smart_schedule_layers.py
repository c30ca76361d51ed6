import numpy as np

from megatron_fssdp.planning.cost.link_seconds import LinkTimes
from megatron_fssdp.planning.cost.stepped_exchange import SteppedExchange
from megatron_fssdp.simulation.timeline.iteration_timeline import IterationTimeline
from megatron_fssdp.simulation.timeline.layer_parts import LayerSeconds


def times(near_s: float, far_s: float) -> LinkTimes:
    return LinkTimes(np.array([near_s]), np.array([far_s]))


def layer(steps: SteppedExchange | None, experts_s: float, exchange: LinkTimes) -> LayerSeconds:
    none, off = np.zeros(1), np.zeros(1, bool)
    nothing = times(0, 0)
    return LayerSeconds(
        before_layer_s=none,
        before_gate_s=none,
        counts_s=0.0,
        dispatch=exchange,
        combine=exchange,
        experts_s=np.array([experts_s]),
        gather=nothing,
        addition_s=none,
        reduce_s=none,
        regather=nothing,
        is_ahead=off,
        is_rematerialized=off,
        is_each_pass=off,
        steps=steps,
        in_steps=np.full(1, steps is not None),
    )


def test_steps_equal_those_worked_out_by_hand() -> None:
    """Three groups; 1 s inside, 3 s for each of the two others, 2 s of compute for each group.

    S ends at 1, 4, 7; C at 3, 6, 9; R at 8 (behind all S), 11 and, C_2 at 9 being ready, 14.
    """
    exchange = times(1.0, 6.0)
    smart = layer(SteppedExchange(3, between_nodes=True), 6.0, exchange)
    assert smart.exchange_and_experts_s(exchange, exchange, np.array([6.0])).tolist() == [14.0]
    timeline = IterationTimeline(1)
    timeline.forward("layer", smart, is_first=True)
    assert timeline.now_s.tolist() == [14.0]
    assert timeline.parts_s["experts"].tolist() == [6.0]
    in_turn = IterationTimeline(1)
    in_turn.forward("layer", layer(None, 6.0, exchange), is_first=True)
    assert in_turn.now_s.tolist() == [6 + 6 + 6]
