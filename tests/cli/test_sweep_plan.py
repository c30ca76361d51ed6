from pathlib import Path

import pytest

from megatron_fssdp.cli.sweep_plan import SweepConfig, load_sweep, planned_runs
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, validate
from megatron_fssdp.config.run.composition import load_run

ROOT = Path(__file__).parents[2]


def sweep_of(**settings) -> SweepConfig:
    defaults = {"run": ["gpt_moe_tiny"], "strategies": ["ep", "fssdp"]}
    return validate(SweepConfig, {**defaults, **settings}, "s.yaml")


def test_every_combination_is_planned_once_and_strategies_take_turns() -> None:
    vary = {"training.lr": [1e-3, 3e-4], "model.moe_layer_freq": [2, [0, 1]]}
    runs = planned_runs(sweep_of(vary=vary, seeds=[1, 2], repetitions=2))
    assert len(runs) == 2 * 2 * 2 * 2 * 2
    assert len({run.folder for run in runs}) == len(runs)
    assert [run.strategy for run in runs[:4]] == ["ep", "fssdp", "ep", "fssdp"]
    assert [run.repetition for run in runs] == [1] * 16 + [2] * 16
    assert len({run.group for run in runs}) == 8
    assert runs[0].folder == "ep-lr=0.001-moe_layer_freq=2-seed1"
    assert runs[2].group == "ep lr=0.001 moe_layer_freq=[0, 1]"
    assert runs[-1].folder.endswith("-seed2-repetition2")


def test_the_overrides_of_a_run_give_its_settings() -> None:
    sweep = sweep_of(
        strategies=[{"name": "fssdp", "settings": {"slots": 2}, "label": "two"}],
        settings={"training.min_lr": 1e-05, "data.split": "90,10,0", "training.save_checkpoints": False},
        vary={"training.lr": [3e-4]},
        seeds=[7],
    )
    (run,) = planned_runs(sweep)
    config = load_run(map(Path, sweep.run), run.overrides)
    assert (config.training.min_lr, config.training.lr, config.training.seed) == (1e-05, 3e-4, 7)
    assert (config.data.split, config.training.save_checkpoints) == ("90,10,0", False)
    assert (run.strategy, run.strategy_overrides) == ("fssdp", ("slots=2",))
    assert run.folder == "two-lr=0.0003-seed7"


def test_a_growing_sweep_keeps_the_folders_of_its_runs() -> None:
    before = planned_runs(sweep_of(vary={"training.lr": [1e-3]}))
    more = {"strategies": ["ep", "fssdp", "quota"], "vary": {"training.lr": [1e-3, 1e-4]}, "seeds": [1, 2]}
    after = planned_runs(sweep_of(**more, repetitions=2))
    assert {run.folder for run in before} < {run.folder for run in after}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategies": ["ep", "ep"]}, "2 runs have the same folder ep-seed1; remove what is listed twice"),
        ({"seeds": []}, "s.yaml: seeds: got []"),
        ({"seeds": [-1]}, "s.yaml: seeds.0: got -1"),
        ({"strategies": [5]}, "strategies.0: got 5, wanted a valid string or an object"),
        ({"strategies": [{"name": "ep", "slots": 2}]}, "strategies.0: unknown key 'slots'; known: name, set"),
        ({"vary": {"training.lr": 1e-3}}, "vary.training.lr: got 0.001, wanted a valid array"),
        ({"vary": {"training.seed": [1]}}, "vary.training.seed: cannot be given here; list seeds"),
        ({"settings": {"strategy.name": "ep"}}, "settings.strategy.name: cannot be given here; list strat"),
        ({"settings": {"a.b": 1}, "vary": {"a.b": [1]}}, "vary.a.b: is under settings, too"),
        ({"seed": 1}, "unknown key 'seed'; did you mean 'seeds'?"),
    ],
)
def test_mistakes_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        planned_runs(sweep_of(**settings))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_equal_last_parts_keep_the_whole_key_and_settings_keep_their_types() -> None:
    runs = planned_runs(sweep_of(strategies=["ep"], vary={"a.size": [1], "b.size": [2], "c.x": ["u/v"]}))
    assert runs[0].folder == "ep-a.size=1-b.size=2-x=u_v-seed1"
    settings = {"data.tokenizer": "bytes", "a.b": "true", "a.c": True, "a.d": ""}
    (run, *_) = planned_runs(sweep_of(settings=settings))
    wanted = {"data": {"tokenizer": "bytes"}, "a": {"b": "true", "c": True, "d": ""}}
    assert apply_overrides({}, run.overrides[:-1]) == wanted


def test_files_beside_the_sweep_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("training: {lr: 0.5}")
    (tmp_path / "sweep.yaml").write_text("run: [gpt_moe_tiny, mine.yaml]\nstrategies: [ep]")
    assert load_sweep(tmp_path / "sweep.yaml").run == ("gpt_moe_tiny", str(tmp_path / "mine.yaml"))


def test_the_runs_of_the_example_differ() -> None:
    sweep = load_sweep(ROOT / "examples" / "sweep" / "sweep.yaml")
    settings = [
        load_run(
            sweep.run,
            [
                f"strategy.name={run.strategy}",
                *(f"strategy.settings.{text}" for text in run.strategy_overrides),
                *run.overrides,
            ],
        )
        for run in planned_runs(sweep)
    ]
    assert len(settings) == 6
    assert all(one not in settings[:index] for index, one in enumerate(settings))
