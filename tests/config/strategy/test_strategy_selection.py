import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.shipped_settings import EpSettings, FssdpSettings, NoneSettings
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_selection import resolve_strategy
from megatron_fssdp.config.strategy.strategy_settings import checks_plans, profile_iterations


def test_every_strategy_has_defaults():
    assert resolve_strategy("none") == ("none", NoneSettings())
    assert resolve_strategy("ep") == ("ep", EpSettings())
    assert resolve_strategy("fssdp") == ("fssdp", FssdpSettings())


def test_overrides_take_precedence_over_the_file(tmp_path):
    path = tmp_path / "strategy.yaml"
    path.write_text("slots: 2\noverlap_degree: 3\nrecord_dir: records\n")
    _, settings = resolve_strategy("fssdp", path, ["overlap_degree=7", "nodes=2"])
    assert settings == FssdpSettings(slots=2, overlap_degree=7, nodes=2, record_dir="records")


def test_unknown_strategy_lists_the_known_ones():
    with pytest.raises(ConfigurationError) as caught:
        resolve_strategy("fsdp")
    for name in STRATEGIES:
        assert name in str(caught.value)
    assert "did you mean 'fssdp'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("none", "slots=3", "no meaning under strategy 'none', which runs Megatron's own dispatcher"),
        ("ep", "slots=2", "belongs to fssdp"),
        ("fssdp", "slot=2", "did you mean 'slots'"),
        ("fssdp", "slots=two", "slots: got 'two' (string), wanted a whole number"),
        ("fssdp", "slots=-1", "wanted greater than or equal to 0"),
        ("smartmoe", "window=0", "wanted greater than or equal to 1"),
        ("fssdp", "window=5", "belongs to smartmoe, flexmoe"),
        ("fssdp", "router=topology_aware", "belongs to ep, fastermoe"),
        ("fssdp", "calibrate=true", "unknown key 'calibrate'"),
        ("fssdp", "reshard_intervall=3", "did you mean 'reshard_interval'"),
    ],
)
def test_bad_settings_name_key_and_reason(name, override, words):
    with pytest.raises(ConfigurationError) as caught:
        resolve_strategy(name, overrides=[override])
    assert words in str(caught.value)
    assert "--moe-strategy-set" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("fssdp", ["slots=0", "rematerialize=true"], "rematerialize true has no meaning without replicas"),
        ("fssdp", ["overlap_degree=0", "overlap=false"], "overlap false has no meaning without replicas"),
        ("prophet", ["slots=0", "left_out=2"], "left_out 2 has no meaning without replicas"),
        ("quota", ["slots=0", "overlap=false"], "overlap false has no meaning without replicas"),
        ("fastermoe", ["slots=0", "latency=paper"], "latency paper has no meaning without replicas"),
        ("ep", ["group_size=2"], "group_size 2 has no meaning without the smart schedule"),
        ("ep", ["leaving_share=0.5"], "leaving_share 0.5 has no meaning under router stock"),
    ],
)
def test_a_setting_without_effect_is_refused(name, overrides, words):
    with pytest.raises(ConfigurationError, match=words):
        resolve_strategy(name, overrides=overrides)


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        ("FSSDP_PROFILE_ITERATIONS", "0", profile_iterations),
        ("FSSDP_PROFILE_ITERATIONS", "two", profile_iterations),
        ("FSSDP_CHECK_PLANS", "true", checks_plans),
    ],
)
def test_variables_for_debugging_are_checked(variable, value, read, monkeypatch):
    assert (profile_iterations(), checks_plans()) == (3, False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=f"{variable}: got '{value}', wanted"):
        read()


@pytest.mark.parametrize("overrides", [["overlap_degree=0", "slots=2"], ["overlap_degree=3", "slots=0"]])
def test_contradictions_are_refused_with_the_reason(overrides):
    with pytest.raises(ConfigurationError, match="exclude each other: "):
        resolve_strategy("fssdp", overrides=overrides)


@pytest.mark.parametrize("exchange", ["deduplicated", "by_price"])
def test_exchanges_with_steps_of_their_own_exclude_each_other(exchange):
    for name, other in (
        ("ep", "schedule=s1"),
        ("fastermoe", "smart_schedule=by_price"),
        ("ep", "smart_schedule=true"),
    ):
        with pytest.raises(ConfigurationError, match=f"exchange={exchange} and {other} exclude each other"):
            resolve_strategy(name, overrides=[f"exchange={exchange}", other])
    _, settings = resolve_strategy("auto", overrides=[f"exchange={exchange}"])
    assert settings.travel.schedule == "megatron"


@pytest.mark.parametrize("override", ["router=topology_aware", "leaving_share=0.1"])
def test_incomplete_gate_settings_are_refused(override):
    with pytest.raises(ConfigurationError, match=r"router .*leaving_share|leaving_share .*router"):
        resolve_strategy("ep", overrides=[override])
    resolve_strategy("fastermoe", overrides=["router=topology_aware", "leaving_share=0.1"])


def test_a_missing_settings_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        resolve_strategy("fssdp", tmp_path / "none.yaml")
