"""An iteration time counts as slower only if it is slower nearly every time."""

from megatron_fssdp.strategies.iteration_spread import IterationSpread


def spread(*seconds: float) -> IterationSpread:
    found = IterationSpread.of(seconds)
    assert found is not None
    return found


def test_quartiles_equal_those_worked_out_by_hand() -> None:
    assert IterationSpread.of([]) is None
    assert spread(4.0, 1.0, 2.0, 3.0, 5.0) == IterationSpread(5, 2.0, 3.0, 4.0)


def test_slower_means_slower_than_the_others_spread() -> None:
    before = spread(1.0, 1.1, 1.2, 1.3)
    assert spread(1.4, 1.5, 1.6, 1.7).is_slower_than(before)
    assert not before.is_slower_than(spread(1.4, 1.5, 1.6, 1.7))
    assert not spread(1.1, 1.2, 1.3, 1.4).is_slower_than(before), "within the spread of iterations"
    assert not spread(9.0, 9.0, 9.0).is_slower_than(before), "too few iterations to tell"
    assert spread(9.0, 1.0, 9.0, 9.0, 9.0).is_slower_than(before), "one fast iteration proves nothing"
