import numpy as np
import pytest

from megatron_fssdp.planning.cost.link_seconds import LinkTimes
from megatron_fssdp.simulation.iteration_timeline import IterationTimeline, LayerSeconds


def times(near_s: float, far_s: float) -> LinkTimes:
    return LinkTimes(np.array([near_s]), np.array([far_s]))


def layer(num_steps: int, experts_s: float, exchange: LinkTimes) -> LayerSeconds:
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
        num_steps=num_steps,
    )


def test_steps_equal_those_worked_out_by_hand() -> None:
    """Three groups; 1 s inside, 3 s for each of the two others, 2 s of compute for each group.

    S ends at 1, 4, 7; C at 3, 6, 9; R at 8 (behind all S), 11 and, C_2 at 9 being ready, 14.
    """
    exchange = times(1.0, 6.0)
    smart = layer(3, 6.0, exchange)
    assert smart.smart_schedule_s(exchange, exchange, np.array([6.0])).tolist() == [14.0]
    timeline = IterationTimeline(1)
    timeline.forward("layer", smart, is_first=True)
    assert timeline.now_s.tolist() == [14.0]
    assert timeline.parts_s["experts"].tolist() == [6.0]
    in_turn = IterationTimeline(1)
    in_turn.forward("layer", layer(1, 6.0, exchange), is_first=True)
    assert in_turn.now_s.tolist() == [6 + 6 + 6]


@pytest.mark.parametrize("experts_s", [0.0, 1.0, 50.0])
def test_a_layer_never_takes_less_than_either_lane(experts_s: float) -> None:
    exchange = times(0.5, 2.0)
    seconds = layer(4, experts_s, exchange).smart_schedule_s(exchange, exchange, np.array([experts_s]))
    assert max(5.0, experts_s) <= seconds[0] <= 5.0 + experts_s


def test_one_node_has_only_links_inside() -> None:
    exchange = times(6.0, 0.0)
    # Own rows at once, then three others of 2 s. S ends at 0, 2, 4, 6; C at 3, 6, 9, 12; R at 6, 8, 11, 14.
    seconds = layer(4, 12.0, exchange).smart_schedule_s(exchange, exchange, np.array([12.0]))
    assert seconds.tolist() == [14.0]
