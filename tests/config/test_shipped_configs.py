"""All files of configs/ load, combine and become Megatron's arguments; models have the stated sizes."""

import re
from functools import cache, reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.loading import apply_overrides, validate
from megatron_fssdp.config.run.composition import compose, lay_over, load_run
from megatron_fssdp.config.run.megatron_arguments import Installation, TokenizedData, megatron_arguments
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.simulation.parameter_count import ParameterCount, count_parameters

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PARTS = ("models", "parallelism", "training")


def names_in(folder: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.yaml"))


def file(folder: str, name: str) -> Path:
    return CONFIGS / folder / f"{name}.yaml"


@cache
def counted(model: str) -> ParameterCount:
    run = load_run([file("models", model), file("training", "tiny")])
    return count_parameters(run.model, run.data.vocab_size)


def arguments(run: RunConfig) -> list[str]:
    data = TokenizedData(Path("d/text"), run.data.vocab_size, run.data.vocab_size - 1, 50, Path("d/cache"))
    machine = Installation(on_cpu=run.training.device == "cpu", has_transformer_engine=False)
    return megatron_arguments(run, data, machine, Path("runs/x"), resume=False)


def value_of(words: list[str], flag: str) -> str:
    assert words.count(flag) == 1, f"{flag} is given {words.count(flag)} times"
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("folder", "sections"),
    {
        "models": {"model", "data"},
        "parallelism": {"parallelism", "training"},
        "strategies": {"strategy"},
        "training": {"training", "model"},
        "experiments": {"model", "parallelism", "training"},
    }.items(),
)
def test_every_file_names_the_schema_and_has_its_folders_sections(folder: str, sections: set[str]) -> None:
    assert names_in(folder)
    for name in names_in(folder):
        path = file(folder, name)
        schema, comment, *_ = path.read_text(encoding="utf-8").splitlines()
        assert schema == "# yaml-language-server: $schema=../schema.json", path
        assert comment.startswith("# "), path
        assert set(compose([path]).layers[-1].data) <= sections, path


@pytest.mark.parametrize("name", names_in("experiments"))
def test_every_experiment_is_a_whole_run_of_one_part_of_each_kind(name: str) -> None:
    path = file("experiments", name)
    run = load_run([path])
    included = [layer.file.parent.name for layer in compose([path]).layers]
    assert set(included) == {*PARTS, "strategies", "experiments"}
    assert included.count("strategies") == included.count("parallelism") == included.count("experiments") == 1
    words = arguments(run)
    assert value_of(words, "--num-experts") == str(run.model.num_experts)
    assert value_of(words, "--moe-strategy") == run.strategy.name
    assert value_of(words, "--expert-model-parallel-size") == str(run.parallelism.expert_model_parallel_size)


# Models of each paper, its clusters with the settings they need, and a batch size.
PAPERS = {
    "hecate": (("hecate-a", "hecate-b"), "measure"),
    "fastermoe": (("johnny",), "measure"),
    "fastermoe-moe-bert-wide": (("trevor",), "measure"),
    "pro-prophet": (("hpnv", "hpwnv"), "pro-prophet-table-iv"),
    "pro-prophet, Table V": (("lpwnv",), "pro-prophet-table-v"),
    "parm": (("parm-b",), "measure"),
    "mixtral": (("h200",), "measure"),
    "deepseek": (("h200",), "measure"),
    "gpt-oss": (("h200",), "measure"),
    "qwen3": (("h200",), "measure"),
    "tiny": (("cpu",), "tiny"),
}
COMBINATIONS = [
    (model, cluster, schedule)
    for paper, (clusters, schedule) in PAPERS.items()
    for model, cluster in product(names_in("models"), clusters)
    if model.startswith(paper.partition(",")[0])
]


def test_every_model_and_every_cluster_is_used() -> None:
    models, clusters, _ = map(set, zip(*COMBINATIONS, strict=True))
    assert models == set(names_in("models"))
    assert {*clusters, "parm-a"} == set(names_in("parallelism"))


@cache
def data_of(folder: str, name: str) -> dict[str, Any]:
    return compose([file(folder, name)]).data


@pytest.mark.parametrize(("model", "cluster", "schedule"), COMBINATIONS)
def test_every_model_runs_on_its_clusters_under_every_strategy(
    model: str, cluster: str, schedule: str
) -> None:
    job = reduce(lay_over, (data_of(*part) for part in zip(PARTS, (model, cluster, schedule), strict=True)))
    assert names_in("strategies")
    for strategy in names_in("strategies"):
        more = ["parallelism.sequence_parallel=true"] if (cluster, strategy) == ("parm-b", "none") else []
        data = lay_over(job, data_of("strategies", strategy))
        run = validate(RunConfig, apply_overrides(data, ["training.global_batch_size=64", *more]), strategy)
        words = arguments(run)
        assert value_of(words, "--moe-strategy") == run.strategy.name
        assert value_of(words, "--moe-ffn-hidden-size") == str(run.model.moe_ffn_hidden_size)
        assert value_of(words, "--num-experts") == str(run.model.num_experts)


def test_every_strategy_has_a_file() -> None:
    chosen = {data_of("strategies", name)["strategy"]["name"] for name in names_in("strategies")}
    assert chosen == set(STRATEGIES)


@pytest.mark.parametrize("name", sorted(set(names_in("parallelism")) - {"cpu"}))
def test_a_parallelism_file_has_the_size_of_its_cluster(name: str) -> None:
    cut, cluster = data_of("parallelism", name)["parallelism"], load_cluster(file("clusters", name))
    assert (cut.get("num_nodes", 1), cut["nproc_per_node"]) == (cluster.num_nodes, cluster.devices_per_node)


# The stated number in billions, what it counts, and the allowed difference: half of the last digit.
STATED = {
    "hecate-gpt-moe-s": ("matrices_of_layers", 1.84, 0.005),
    "hecate-gpt-moe-l": ("matrices_of_layers", 7.36, 0.005),
    "hecate-bert-moe": ("matrices_of_layers", 3.27, 0.005),
    "hecate-bert-moe-deep": ("matrices_of_layers", 6.54, 0.005),
    "fastermoe-moe-gpt-s": ("matrices_of_layers", 0.86, 0.005),
    "fastermoe-moe-gpt": ("matrices_of_layers", 3.42, 0.005),
    "fastermoe-moe-gpt-l": ("matrices_of_layers", 13.7, 0.05),
    "fastermoe-moe-bert-deep": ("matrices_of_layers", 1.71, 0.005),
    "fastermoe-moe-bert-deep-l": ("matrices_of_layers", 27.4, 0.05),
    "fastermoe-moe-bert-wide": ("matrices_of_layers", 3.27, 0.005),
    "fastermoe-moe-bert-wide-l": ("matrices_of_layers", 13.1, 0.05),
    "mixtral-8x7b": ("total", 46.7, 0.05),
    "mixtral-8x22b": ("total", 141, 0.5),
    "deepseekmoe-16b": ("total", 16.4, 0.05),
    "deepseek-v3": ("main_model", 671, 0.5),
    "qwen3-30b-a3b": ("total", 30.5, 0.05),
    "qwen3-235b-a22b": ("total", 235, 0.5),
    "gpt-oss-120b": ("total", 116.83, 0.005),
}
STATED_FOR_A_TOKEN = {
    "mixtral-8x7b": (12.9, 0.05),
    "mixtral-8x22b": (39, 0.5),
    "deepseekmoe-16b": (2.8, 0.05),
    "deepseek-v3": (
        36.6 + 0.93,
        0.05,
    ),  # The stated 36.6 (rounded to 37 in the paper) leave out the embeddings.
    "qwen3-235b-a22b": (22, 0.5),
    "gpt-oss-120b": (5.13 + 0.58, 0.005),  # The stated 5.13 leave out the embeddings.
    "qwen3-30b-a3b": (3.3, 0.06),  # 3.35; without gates it would be 3.34
}


@pytest.mark.parametrize("name", STATED)
def test_models_have_the_stated_sizes(name: str) -> None:
    what, billions, tolerance = STATED[name]
    assert getattr(counted(name), what) / 1e9 == pytest.approx(billions, abs=tolerance)
    if name in STATED_FOR_A_TOKEN:
        billions, tolerance = STATED_FOR_A_TOKEN[name]
        assert counted(name).activated / 1e9 == pytest.approx(billions, abs=tolerance)


def test_layer_of_later_tokens_has_the_stated_size() -> None:
    """DeepSeek's description of its weights states 11.5 B for the layer and its projection, without norms."""
    assert counted("deepseek-v3").multi_token_prediction / 1e9 == pytest.approx(11.6, abs=0.1)


@pytest.mark.parametrize(
    ("name", "layers", "embedding", "hidden"),
    [
        ("s", 12, 512, 1024),
        ("m", 12, 1024, 2048),
        ("l", 12, 2048, 4096),
        ("ds", 24, 512, 1024),
        ("dm", 24, 1024, 2048),
    ],
)
def test_pro_prophets_models_are_those_of_its_table_iii(
    name: str, layers: int, embedding: int, hidden: int
) -> None:
    model = load_run([file("models", f"pro-prophet-moe-gpt-{name}"), file("training", "tiny")]).model
    assert (model.num_layers, model.hidden_size, model.moe_ffn_hidden_size) == (layers, embedding, hidden)
    assert all(model.moe_layers)


def _without_gates(name: str) -> int:
    """Parameters that one token uses, without those of the gates."""
    model = load_run([file("models", name), file("training", "tiny")]).model
    return counted(name).activated - sum(model.moe_layers) * model.hidden_size * (model.num_experts or 0)


def test_parms_gpt2_without_experts_is_gpt2() -> None:
    """GPT-2 has 124 M parameters: those active for a token without the gates, plus 0.1 M for biases."""
    assert _without_gates("parm-gpt2") / 1e6 == pytest.approx(124.4, abs=0.2)


def test_parms_bert_base_without_experts_is_bert_base() -> None:
    """110 M parameters (Devlin et al. 2019, §3)."""
    assert _without_gates("parm-bert-base") / 1e6 == pytest.approx(110, abs=0.5)


def test_berts_train_on_sentences_and_gpts_on_texts() -> None:
    assert names_in("models")
    for name in names_in("models"):
        run = load_run([file("models", name), file("training", "tiny")])
        assert run.model.family == ("bert" if "bert" in name else "gpt")
        assert ("--tokenizer-model" in arguments(run)) == ("bert" in name)


def test_tables_of_the_page_show_the_counted_sizes() -> None:
    text = (ROOT / "docs" / "configs.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([^\n]+) \|$", text, re.MULTILINE))
    models = {name: row.split(" | ") for name, row in rows.items() if name in names_in("models")}
    assert set(models) == {name for name in names_in("models") if not name.startswith("tiny-")}
    for name, (stated, *figures) in models.items():
        count = counted(name)
        wanted = (count.matrices_of_layers, count.total, count.activated)
        assert figures == [f"{elements / 1e9:.2f}" for elements in wanted], name
        words = stated.split()[0].rstrip(",")
        assert words == (str(STATED[name][1]) if name in STATED else "–"), name
