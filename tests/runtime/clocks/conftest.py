from types import SimpleNamespace

import pytest

from megatron_fssdp.runtime.clocks import layer_stopwatch, pass_timer


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only when told to."""
    clock = SimpleNamespace(now_s=100.0)
    for module in (layer_stopwatch, pass_timer):
        monkeypatch.setattr(module, "now", lambda is_cuda: clock.now_s)
    return clock
