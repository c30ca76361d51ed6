import pytest

from megatron_fssdp.config.strategy_selection import SETTINGS_BY_STRATEGY
from megatron_fssdp.megatron_adapter import overwritten_checkpoint, owner_hint, registration
from megatron_fssdp.megatron_adapter.strategy_session import StrategySession


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("ep", {}, ["marks"]),
        ("fssdp", {"reshard_interval": 0}, ["marks"]),
        ("fssdp", {}, ["owners", "marks"]),
    ],
)
def test_only_a_run_that_re_shards_takes_over_owners(name, settings, wanted, monkeypatch):
    """Others may save formats that know experts by their place, which checks allow them."""
    wrapped = []
    monkeypatch.setattr(owner_hint, "wrap_checkpointing", lambda *_: wrapped.append("owners"))
    monkeypatch.setattr(overwritten_checkpoint, "wrap_save", lambda *_: wrapped.append("marks"))
    session = StrategySession(name, SETTINGS_BY_STRATEGY[name](**settings))
    registration._follow_in_checkpoints(session)
    assert wrapped == wanted
