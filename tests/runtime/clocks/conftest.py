import pytest

from megatron_fssdp.runtime.clocks import layer_stopwatch, pass_timer


class Clock:
    """A clock that advances only when told to."""

    now_s = 100.0

    def passes(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (layer_stopwatch, pass_timer):
        monkeypatch.setattr(module, "now", lambda is_cuda: clock.now_s)
    return clock
