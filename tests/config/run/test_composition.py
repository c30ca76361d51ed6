"""Run configurations composed of several files."""

import re
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import (
    compose,
    difference,
    lay_over,
    load_run,
    set_options,
    words_option,
)

MODEL = "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, seq_length: 32, num_experts: 4}"
TRAINING = "training: {train_iters: 3, global_batch_size: 4}"
FSSDP = "strategy: {name: fssdp, settings: {slots: 1, overlap_degree: 2}}"


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def refusal(*files: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_run(files, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_overrides_what_it_includes_and_paths_are_relative_to_its_folder(tmp_path, monkeypatch):
    write(
        tmp_path,
        models__base=MODEL,
        models__wide="include: [base.yaml]\nmodel: {hidden_size: 64}",
        parts__training=TRAINING,
        experiments__run=(
            "include: [../models/wide.yaml, ../parts/training.yaml, ../parts/fssdp.yaml]\n"
            "training: {lr: 1e-4}\nparallelism: {nproc_per_node: 2, expert_model_parallel_size: 2}"
        ),
        parts__fssdp=FSSDP,
    )
    monkeypatch.chdir(tmp_path / "parts")
    run = load_run(["../experiments/run.yaml"])
    assert (run.model.hidden_size, run.model.num_layers) == (64, 2)
    assert (run.training.lr, run.training.train_iters) == (1e-4, 3)
    assert run.strategy.settings == {"slots": 1, "overlap_degree": 2}
    names = [layer.file.name for layer in compose([tmp_path / "experiments" / "run.yaml"]).layers]
    assert names == ["base.yaml", "wide.yaml", "training.yaml", "fssdp.yaml", "run.yaml"]


def test_later_files_override_earlier_ones_and_set_options_override_all(tmp_path):
    write(
        tmp_path, a=f"{MODEL}\n{TRAINING}", b="training: {train_iters: 5, seed: 7}", c="training: {seed: 8}"
    )
    run = load_run([tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.yaml"], ["training.seed=9"])
    assert (run.training.train_iters, run.training.seed) == (5, 9)
    # A file that is given again is applied again.
    asked = [tmp_path / f"{name}.yaml" for name in "abcb"]
    assert load_run(asked).training.seed == 7


def test_settings_belong_to_their_strategy():
    fssdp = {"strategy": {"name": "fssdp", "settings": {"slots": 1, "overlap_degree": 2}}}
    assert lay_over(fssdp, {"strategy": {"settings": {"slots": 3}}})["strategy"] == {
        "name": "fssdp",
        "settings": {"slots": 3, "overlap_degree": 2},
    }
    assert lay_over(fssdp, {"strategy": {"name": "fssdp"}}) == fssdp
    assert lay_over(fssdp, {"strategy": {"name": "quota"}})["strategy"] == {"name": "quota"}
    assert lay_over({"strategy": {"settings": {}}}, {"strategy": {"name": "ep"}})["strategy"] == {
        "name": "ep"
    }


def test_a_difference_gives_the_upper_layer_again():
    low = {"model": {"num_layers": 2}, "strategy": {"name": "fssdp", "settings": {"slots": 1}}}
    high = {"model": {"num_layers": 2, "num_experts": 4}, "strategy": {"name": "ep"}}
    assert difference(low, high) == {"model": {"num_experts": 4}, "strategy": {"name": "ep"}}
    assert lay_over(low, difference(low, high)) == high


def test_null_leaves_a_mapping_and_resets_a_value():
    low = {"model": {"num_experts": 4, "moe_layer_freq": [0, 1]}}
    assert lay_over(low, {"model": None}) == low
    assert lay_over(low, {"model": {"num_experts": None}})["model"]["num_experts"] is None
    assert lay_over(low, {"model": {"moe_layer_freq": [1, 1]}})["model"]["moe_layer_freq"] == [1, 1]
    assert low["model"]["moe_layer_freq"] == [0, 1]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("model: {num_layer: 2}", "model: unknown key 'num_layer'; did you mean 'num_layers'?"),
        ("model: {num_layers: two}", "model.num_layers: got 'two' (string), wanted a whole number"),
        ("model: {window_size: [7]}", "model.window_size.1: missing; add this key"),
        ("modell: {}", "unknown key 'modell'; did you mean 'model'?"),
        ("strategy: {name: fsdp}", "strategy: unknown MoE strategy 'fsdp'; did you mean 'fssdp'?"),
    ],
)
def test_a_mistake_is_reported_with_the_file_that_has_it(tmp_path, model, words):
    write(tmp_path, base=f"{MODEL}\n{TRAINING}", part=model, run="include: [base.yaml, part.yaml]")
    run, base, part = (tmp_path / f"{name}.yaml" for name in ("run", "base", "part"))
    for message in (refusal(run), refusal(base, part)):
        assert words in message
        assert message.startswith(f"{part}: ") or "missing" in words


def test_a_wrong_override_is_not_blamed_on_a_file(tmp_path):
    write(tmp_path, base=f"{MODEL}\n{TRAINING}", run="include: [base.yaml]")
    message = refusal(tmp_path / "run.yaml", overrides=("model.num_layers=two",))
    wrong = "model.num_layers: got 'two' (string), wanted a whole number"
    assert message == f"--set model.num_layers=two: {wrong}"


def test_files_that_contradict_each_other_are_refused(tmp_path):
    write(
        tmp_path,
        base=f"{MODEL}\n{TRAINING}",
        cut="parallelism: {nproc_per_node: 3, expert_model_parallel_size: 3}",
    )
    files = tmp_path / "base.yaml", tmp_path / "cut.yaml"
    wanted = "parallelism.expert_model_parallel_size 3 does not divide model.num_experts 4"
    assert refusal(*files).startswith(f"base.yaml, cut.yaml: {wanted}")


def test_words_after_two_dashes_win_over_the_yaml_and_are_settings_like_all_others(tmp_path):
    write(tmp_path, run=f"{MODEL}\n{TRAINING}")
    words = ["--hidden-size", "64", "--swiglu", "--num-workers", "3", "--moe-layer-freq", "[0,1]"]
    options = [*set_options(["model.hidden_size=128"]), words_option(words)]
    run = compose([tmp_path / "run.yaml"]).with_options(options)
    assert (run.model.hidden_size, run.model.swiglu, run.model.moe_layer_freq) == (64, True, (0, 1))
    assert run.training.model_extra == {"num_workers": 3}
    for wrong, message in (
        ("--hiden-size", "Megatron has no argument --hiden-size; did you mean --hidden-size?"),
        ("--swiglu=3", "ignored explicit argument '3'"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            compose([tmp_path / "run.yaml"]).with_options([words_option([wrong])])


def test_circular_includes_are_refused(tmp_path):
    write(tmp_path, a="include: [b.yaml]", b="include: [deep/c.yaml]", deep__c="include: [../a.yaml]")
    a, b, c = tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "deep" / "c.yaml"
    assert (
        refusal(a) == f"{a}: files include each other in a circle, {a} → {b} → {c} → {a}; remove one include"
    )
    write(tmp_path, own="include: [own.yaml]")
    assert "in a circle" in refusal(tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("include: x.yaml", "include: got 'x.yaml' (string), wanted a list of YAML files"),
        ("include: {a: b}", "include: got a mapping, wanted a list"),
        ("include:", "include: got nothing (null), wanted a list"),
        ("include: [x.yaml, 3]", "include: got 3 (whole number), wanted a list of YAML files"),
        ("include: ['']", "include: got '' (string), wanted a list of YAML files"),
    ],
)
def test_invalid_include_values_are_refused(tmp_path, text, words):
    write(tmp_path, x=f"{MODEL}\n{TRAINING}", run=text)
    assert refusal(tmp_path / "run.yaml").startswith(f"{tmp_path / 'run.yaml'}: {words}")


def test_missing_files_and_invalid_yaml_are_refused(tmp_path):
    write(tmp_path, a="include: [b.yaml]", b="include: [none.yaml]", c="include: [bad.yaml]", bad="model: [")
    b, none = tmp_path / "b.yaml", tmp_path / "none.yaml"
    assert refusal(tmp_path / "a.yaml").startswith(f"{b}: include: {none}: no such file")
    words = f"{tmp_path / 'c.yaml'}: include: {tmp_path / 'bad.yaml'}: not valid YAML at line 1"
    assert refusal(tmp_path / "c.yaml").startswith(words)
    assert refusal(none).startswith(f"{none}: no such file")


def test_include_is_allowed_only_in_files(tmp_path):
    write(tmp_path, run=f"{MODEL}\n{TRAINING}")
    assert "unknown key 'include'" in refusal(tmp_path / "run.yaml", overrides=("include=[x.yaml]",))
