import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES, resolve_strategy
from megatron_fssdp.config.strategy.strategy_settings import checks_plans, profile_iterations, puts_weights
from megatron_fssdp.strategies.fssdp import FssdpSettings


def test_every_strategy_has_defaults_and_overrides_take_precedence_over_the_file(tmp_path):
    for name, entry in STRATEGIES.items():
        assert resolve_strategy(name) == entry.settings()
    path = tmp_path / "strategy.yaml"
    path.write_text("slots: 2\noverlap_degree: 3\nrecord_dir: records\n")
    settings = resolve_strategy("fssdp", path, ["overlap_degree=7", "nodes=2"])
    assert settings == FssdpSettings(slots=2, overlap_degree=7, nodes=2, record_dir="records")
    with pytest.raises(ConfigurationError, match="no such file"):
        resolve_strategy("fssdp", tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("none", "slots=3", "no meaning under strategy 'none', which runs Megatron's own dispatcher"),
        ("ep", "slots=2", "belongs to fssdp"),
        ("fssdp", "window=5", "belongs to smartmoe, flexmoe"),
        ("fssdp", "slot=2", "did you mean 'slots'"),
        ("fssdp", "slots=two", "slots: got 'two', wanted a valid integer"),
        ("fssdp", "slots=-1", "wanted greater than or equal to 0"),
        # settings without effect
        ("fssdp", "slots=0 rematerialize=true", "rematerialize true has no effect with slots 0"),
        ("fssdp", "overlap_degree=0 overlap=false", "overlap false has no effect with overlap_degree 0"),
        ("prophet", "slots=0 left_out=2", "left_out 2 has no effect with slots 0"),
        ("fastermoe", "slots=0 latency=paper", "latency paper has no effect with slots 0"),
        ("ep", "group_size=2", "group_size 2 has no effect with smart_schedule false"),
        ("ep", "leaving_share=0.1", "leaving_share 0.1 has no effect with router stock"),
        # contradictions
        ("ep", "router=topology_aware", "router topology_aware needs leaving_share"),
        ("fssdp", "overlap_degree=0 slots=2", "exclude each other: "),
        ("fssdp", "overlap_degree=3 slots=0", "exclude each other: "),
        ("ep", "exchange=by_price schedule=s1", "exchange=by_price and schedule=s1 exclude each other"),
        ("ep", "exchange=deduplicated smart_schedule=true", "and smart_schedule=true exclude each other"),
    ],
)
def test_bad_settings_name_key_and_reason(name, overrides, words):
    with pytest.raises(ConfigurationError) as caught:
        resolve_strategy(name, overrides=overrides.split())
    assert words in str(caught.value)
    assert "--moe-strategy-set" in str(caught.value)


def test_auto_selects_schedules_unless_tokens_travel_once():
    for exchange, schedule in (("megatron", "auto"), ("deduplicated", "megatron"), ("by_price", "megatron")):
        settings = resolve_strategy("auto", overrides=[f"exchange={exchange}"])
        assert settings.travel.schedule == schedule


def test_variables_for_debugging_are_checked(monkeypatch):
    assert (profile_iterations(), checks_plans(), puts_weights()) == (3, False, False)
    for variable, value, read in (
        ("FSSDP_PROFILE_ITERATIONS", "0", profile_iterations),
        ("FSSDP_PROFILE_ITERATIONS", "two", profile_iterations),
        ("FSSDP_CHECK_PLANS", "true", checks_plans),
        ("FSSDP_PEER_PUTS", "yes", puts_weights),
    ):
        monkeypatch.setenv(variable, value)
        with pytest.raises(ConfigurationError, match=f"{variable}: got '{value}', wanted"):
            read()
