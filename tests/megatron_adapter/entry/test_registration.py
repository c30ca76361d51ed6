import pytest

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.megatron_adapter.checkpoints import overwritten_checkpoint
from megatron_fssdp.megatron_adapter.entry import registration
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("ep", {}, ["marks"]),
        ("fssdp", {"reshard_interval": 0}, ["marks"]),
        ("fssdp", {}, ["megatron_fssdp_owners", "marks"]),
        ("auto", {}, ["megatron_fssdp_owners", "megatron_fssdp_choices", "marks"]),
        ("auto", {"smartmoe": False}, ["megatron_fssdp_choices", "marks"]),
    ],
)
def test_checkpoints_keep_what_a_run_may_change(name, settings, wanted, monkeypatch):
    """Where owners stay, checkpoint formats that identify experts by position are allowed."""
    wrapped = []
    monkeypatch.setattr(
        registration, "wrap_checkpointing", lambda _, hints: wrapped.extend(hint.key for hint in hints)
    )
    monkeypatch.setattr(overwritten_checkpoint, "wrap_save", lambda *_: wrapped.append("marks"))
    session = StrategySession(name, STRATEGIES[name].settings(**settings))
    registration._follow_in_checkpoints(session)
    assert wrapped == wanted
