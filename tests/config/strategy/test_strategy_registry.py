import os
from dataclasses import replace

import pytest
from pydantic import Field

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import (
    STRATEGIES,
    RegisteredStrategy,
    StrategyRegistry,
    strategy_settings,
)
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.strategies.ep import EpSettings
from megatron_fssdp.strategies.ep.ep_strategy import EpStrategy
from megatron_fssdp.strategies.none import NoneSettings
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy

from ...support.python_process import ROOT, python_output, run_python


class MadeSettings(PlacementSettings):
    number: int = Field(default=1, ge=0, description="A number.")


class NeedySettings(PlacementSettings):
    number: int


ENTRY = RegisteredStrategy("made", MadeSettings, "nowhere:Nothing", "made up", "#123456")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": EpSettings}, "of mine: is registered already, by theirs"),
        ({"name": "Made-Up"}, "a lower-case letter"),
        ({"name": "other", "settings": NoneSettings}, "wanted a subclass of PlacementSettings"),
        ({"name": "other", "settings": NeedySettings}, "settings key 'number' has no default"),
    ],
)
def test_what_would_fail_later_is_refused_with_the_package(changes, words):
    table = StrategyRegistry(lambda: [replace(ENTRY, package="theirs")], group="megatron_fssdp.no_such_group")
    with pytest.raises(ConfigurationError) as refusal:
        table.add(replace(ENTRY, package="mine", **changes))
    assert words in str(refusal.value)
    assert list(table) == ["made"]


class Moving(EpStrategy):
    moves_owners = True


class Selecting(EpStrategy):
    selects = True


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: "nothing", "got str, wanted a"),
        ("a_module_that_is_not_there:Made", "cannot be built: .*No module named"),
        (Strategy, "cannot be built: .*Strategy does not implement before_gate"),
        (lambda _: 1 / 0, "cannot be built: ZeroDivisionError: division by zero"),
        (Moving, "got moves_owners .* of MovesOwners"),
        (Selecting, "got selects"),
    ],
)
def test_what_makes_no_strategy_is_refused_when_it_is_built(monkeypatch, make, reason):
    monkeypatch.setitem(STRATEGIES._with_shipped(), "made", replace(ENTRY, strategy=make, package="theirs"))
    with pytest.raises(ConfigurationError, match=f"strategy made of package theirs:? {reason}"):
        build_strategy("made", MadeSettings())


# --- packages that are installed for a process of their own


def write_package(folder, name, strategy, body):
    """What pip leaves of a package: a module, and metadata with an entry point."""
    (folder / f"{name}.py").write_text(body)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[megatron_fssdp.strategies]\n{strategy} = {name}:register\n")


def run_with(folder, code, **environment):
    return run_python("-c", code, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]), **environment)


LIST = "from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES; print(*STRATEGIES)"
REGISTER = """
import megatron_fssdp
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
class {name}Settings(PlacementSettings):
    pass
def register():
    strategy = dict(strategy="nowhere:Nothing", summary="x")
    megatron_fssdp.register_strategy("{name}", settings={name}Settings, **strategy)
"""


@pytest.mark.parametrize(
    ("strategy", "body", "reason"),
    [
        ("lost", "import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
        ("lost", "def register():\n    pass", "registered no strategy of this name"),
        ("ep", REGISTER.format(name="ep"), "is registered already, by megatron-fssdp"),
    ],
)
def test_a_broken_package_is_named_once_and_breaks_nothing_else(strategy, body, reason, tmp_path):
    write_package(tmp_path, "brittle", strategy, body)
    write_package(tmp_path, "sound", "sound", REGISTER.format(name="sound"))
    code = f"{LIST}\nfrom megatron_fssdp.config.strategy.strategy_registry import resolve_strategy\n"
    code += "resolve_strategy('fssdp'); resolve_strategy('sound')\n"
    code += f"try:\n    resolve_strategy('{strategy}')\nexcept ValueError as error:\n    print(error)"
    done = run_with(tmp_path, code)
    assert done.returncode == 0, done.stderr
    names, _, asked = done.stdout.partition("\n")
    assert names.split() == [*STRATEGIES, "sound"]
    refusal = f"strategy '{strategy}' of the installed package brittle cannot be used"
    assert strategy == "ep" or asked.startswith(refusal)
    (line,) = done.stderr.splitlines()
    for words in (refusal, reason, "pip uninstall brittle"):
        assert words in line
    assert run_with(tmp_path, LIST, RANK="1").stderr == "", "one rank says it"


def test_importing_the_package_and_the_table_loads_no_plugin_and_no_torch(tmp_path):
    write_package(tmp_path, "brittle", "lost", "print('loaded')")
    code = (
        "import sys, megatron_fssdp; megatron_fssdp.register_strategy\n"
        "assert not {'torch', 'numpy', 'brittle'} & set(sys.modules)"
    )
    done = run_with(tmp_path, code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_strategies_have_their_names_without_docstrings():
    assert python_output("-OO", "-c", LIST).split() == [*STRATEGIES]


# --- auto


@pytest.fixture
def made_candidate(monkeypatch):
    entry = replace(ENTRY, is_candidate=True, package="theirs")
    monkeypatch.setitem(STRATEGIES._with_shipped(), "made", entry)


def test_autos_keys_are_its_candidates_and_are_checked_by_their_models(made_candidate):
    fields = STRATEGIES["auto"].settings.model_fields
    candidates = {name for name, entry in STRATEGIES.items() if entry.is_candidate}
    assert {name for name in STRATEGIES if name in fields} == candidates
    given = strategy_settings("auto", {"made": {"number": 3}}, "test")
    assert given.candidates["made"] == MadeSettings(number=3)
    left_out = strategy_settings("auto", {"made": False}, "test")
    assert "made" not in left_out.candidates
    for value, words in (
        ({"number": -1}, r"made\.number: got -1"),
        ({"numbr": 1}, "unknown key 'numbr'; did you mean 'number'"),
        ({"nodes": 1}, r"made\.nodes has no meaning for a candidate"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            strategy_settings("auto", {"made": value}, "test")


def test_a_candidate_that_cannot_be_built_is_left_out_with_a_warning(made_candidate, monkeypatch, caplog):
    entry = replace(STRATEGIES["made"], strategy="a_module_that_is_not_there:Made")
    monkeypatch.setitem(STRATEGIES._entries, "made", entry)
    strategy = build_strategy("auto", strategy_settings("auto", {}, "test"))
    assert "made" not in strategy.candidates
    assert "candidate 'made' of package theirs is left out" in caplog.text
    assert "made=false" in caplog.text
