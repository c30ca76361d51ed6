from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import compose, lay_over, load_run

MODEL = "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, seq_length: 32, num_experts: 4}"
TRAINING = "training: {train_iters: 3, global_batch_size: 4}"
FSSDP = "strategy: {name: fssdp, settings: {slots: 1, overlap_degree: 2}}"


def write(folder, **texts):
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def refusal(*files, overrides=()):
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
    names = [Path(layer.name).name for layer in compose([tmp_path / "experiments" / "run.yaml"]).layers]
    assert names == ["base.yaml", "wide.yaml", "training.yaml", "fssdp.yaml", "run.yaml"]


def test_later_files_override_earlier_ones_and_set_options_override_all(tmp_path):
    write(
        tmp_path, a=f"{MODEL}\n{TRAINING}", b="training: {train_iters: 5, seed: 7}", c="training: {seed: 8}"
    )
    run = load_run([tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.yaml"], ["training.seed=9"])
    assert (run.training.train_iters, run.training.seed) == (5, 9)
    asked = [tmp_path / f"{name}.yaml" for name in "abcb"]  # a file that is given again is applied again
    assert load_run(asked).training.seed == 7


def test_settings_belong_to_their_strategy_and_null_leaves_a_mapping():
    fssdp = {"strategy": {"name": "fssdp", "settings": {"slots": 1, "overlap_degree": 2}}}
    assert lay_over(fssdp, {"strategy": {"settings": {"slots": 3}}})["strategy"] == {
        "name": "fssdp",
        "settings": {"slots": 3, "overlap_degree": 2},
    }
    assert lay_over(fssdp, {"strategy": {"name": "fssdp"}}) == fssdp
    assert lay_over(fssdp, {"strategy": {"name": "quota"}})["strategy"] == {"name": "quota"}
    low = {"model": {"num_experts": 4, "moe_layer_freq": [0, 1]}}
    assert lay_over(low, {"model": None}) == low
    assert lay_over(low, {"model": {"num_experts": None}})["model"]["num_experts"] is None
    assert lay_over(low, {"model": {"moe_layer_freq": [1, 1]}})["model"]["moe_layer_freq"] == [1, 1]


@pytest.mark.parametrize(
    ("part", "override", "words"),
    [
        ("model: {num_layer: 2}", "model.hidden_size=64", "model: unknown key 'num_layer'; did you mean"),
        ("model: {num_layers: two}", "model.hidden_size=64", "model.num_layers: got 'two', wanted"),
        ("model: {window_size: [7]}", "training.lr=1", "model.window_size.1: missing; add this key"),
        ("modell: {}", "training.lr=1", "unknown key 'modell'; did you mean 'model'?"),
        ("strategy: {name: fsdp}", "training.lr=1", "strategy: unknown MoE strategy 'fsdp'; did you mean"),
        (FSSDP, "model.num_layers=two", "model.num_layers: got 'two', wanted a valid integer"),
        (FSSDP, "include=[x.yaml]", "unknown key 'include'"),
    ],
)
def test_a_mistake_is_reported_with_the_file_or_option_that_has_it(tmp_path, part, override, words):
    write(tmp_path, base=f"{MODEL}\n{TRAINING}", part=part, run="include: [base.yaml, part.yaml]")
    run, base, file = (tmp_path / f"{name}.yaml" for name in ("run", "base", "part"))
    source = f"--set {override}" if part == FSSDP else file
    for message in (refusal(run, overrides=(override,)), refusal(base, file, overrides=(override,))):
        assert message.startswith(f"{source}: {words}")


def test_values_that_contradict_each_other_are_refused_with_the_options_or_files_that_give_them(tmp_path):
    cut = "parallelism: {expert_model_parallel_size: 3, nproc_per_node: 3}"
    write(tmp_path, base=f"{MODEL}\n{TRAINING}", cut=cut)
    files = tmp_path / "base.yaml", tmp_path / "cut.yaml"
    wanted = "parallelism.expert_model_parallel_size 3 does not divide model.num_experts"
    unrelated, cause = "training.lr=1", "model.num_experts=8"
    assert refusal(*files, overrides=(unrelated,)).startswith(f"{files[0]}, {files[1]}: {wanted} 4")
    assert refusal(*files, overrides=(unrelated, cause)).startswith(f"--set {cause}: {wanted} 8")


def test_circular_includes_are_refused(tmp_path):
    write(tmp_path, a="include: [b.yaml]", b="include: [deep/c.yaml]", deep__c="include: [../a.yaml]")
    a, b, c = tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "deep" / "c.yaml"
    assert f"{a}: files include each other in a circle, {a} → {b} → {c} → {a}; " in refusal(a)


@pytest.mark.parametrize("value", ["x.yaml", "{a: b}", "", "[x.yaml, 3]", "['']"])
def test_invalid_include_values_are_refused(tmp_path, value):
    write(tmp_path, x=f"{MODEL}\n{TRAINING}", run=f"include: {value}")
    message = refusal(tmp_path / "run.yaml")
    assert message.startswith(f"{tmp_path / 'run.yaml'}: include: got ")
    assert "wanted a list of YAML files" in message


def test_missing_files_and_invalid_yaml_are_refused(tmp_path):
    write(tmp_path, a="include: [b.yaml]", b="include: [none.yaml]", c="include: [bad.yaml]", bad="model: [")
    b, none = tmp_path / "b.yaml", tmp_path / "none.yaml"
    assert refusal(tmp_path / "a.yaml").startswith(f"{b}: include: {none}: no such file")
    words = f"{tmp_path / 'c.yaml'}: include: {tmp_path / 'bad.yaml'}: not valid YAML at line 1"
    assert refusal(tmp_path / "c.yaml").startswith(words)
    assert refusal(none).startswith(f"{none}: no such file")
