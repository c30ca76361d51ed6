import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.fssdp_settings import FssdpSettings
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_selection import resolve_strategy
from megatron_fssdp.config.strategy.strategy_settings import EpSettings, NoneSettings


def test_every_strategy_has_defaults():
    assert resolve_strategy("none") == ("none", NoneSettings())
    assert resolve_strategy("ep") == ("ep", EpSettings())
    assert resolve_strategy("fssdp") == ("fssdp", FssdpSettings())


def test_overrides_take_precedence_over_the_file(tmp_path):
    path = tmp_path / "strategy.yaml"
    path.write_text("slots: 2\nwindow: 3\nrecord_dir: records\n")
    _, settings = resolve_strategy("fssdp", path, ["window=7", "nodes=2"])
    assert settings == FssdpSettings(slots=2, window=7, nodes=2, record_dir="records")


def test_unknown_strategy_lists_the_known_ones():
    with pytest.raises(ConfigurationError) as caught:
        resolve_strategy("fsdp")
    for name in STRATEGIES:
        assert name in str(caught.value)
    assert "did you mean 'fssdp'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("none", "window=3", "no meaning under strategy 'none', which runs Megatron's own dispatcher"),
        ("ep", "slots=2", "belongs to fssdp"),
        ("fssdp", "slot=2", "did you mean 'slots'"),
        ("fssdp", "slots=two", "slots: got 'two' (string), wanted a whole number"),
        ("fssdp", "slots=-1", "wanted greater than or equal to 0"),
        ("fssdp", "window=0", "wanted greater than or equal to 1"),
    ],
)
def test_bad_settings_name_key_and_reason(name, override, words):
    with pytest.raises(ConfigurationError) as caught:
        resolve_strategy(name, overrides=[override])
    assert words in str(caught.value)
    assert "--moe-strategy-set" in str(caught.value)


@pytest.mark.parametrize("overrides", [["overlap_degree=0", "slots=2"], ["overlap_degree=3", "slots=0"]])
def test_contradictions_are_refused_with_the_reason(overrides):
    with pytest.raises(ConfigurationError, match="exclude each other: "):
        resolve_strategy("fssdp", overrides=overrides)


@pytest.mark.parametrize("exchange", ["deduplicated", "by_price"])
def test_exchanges_with_steps_of_their_own_exclude_each_other(exchange):
    for name, other in (
        ("ep", "schedule=s1"),
        ("fssdp", "smart_schedule=by_price"),
        ("auto", "smart_schedule=true"),
    ):
        with pytest.raises(ConfigurationError, match=f"exchange={exchange} and {other} exclude each other"):
            resolve_strategy(name, overrides=[f"exchange={exchange}", other])
    _, settings = resolve_strategy("auto", overrides=[f"exchange={exchange}"])
    assert settings.collective_schedule.name == "megatron"


@pytest.mark.parametrize("override", ["router=topology_aware", "leaving_share=0.1"])
def test_incomplete_gate_settings_are_refused(override):
    with pytest.raises(ConfigurationError, match=r"router .*leaving_share|leaving_share .*router"):
        resolve_strategy("ep", overrides=[override])
    resolve_strategy("quota", overrides=["router=topology_aware", "leaving_share=0.1"])


def test_a_missing_settings_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        resolve_strategy("fssdp", tmp_path / "none.yaml")
