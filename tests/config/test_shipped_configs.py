"""All files of configs/ load, combine and become Megatron's arguments; models have the stated sizes."""

from functools import cache
from itertools import product
from pathlib import Path

import pytest

from megatron_fssdp.config.cluster_description import ClusterDescription, load_cluster
from megatron_fssdp.config.run.composition import compose, load_run
from megatron_fssdp.config.run.megatron_arguments import Installation, TokenizedData, megatron_arguments
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.simulation.parameter_count import ParameterCount, count_parameters

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def names_in(folder: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.yaml"))


@cache
def counted(model: str) -> ParameterCount:
    run = load_run([f"models/{model}", "training/tiny"])
    return count_parameters(run.model, run.data.vocab_size)


def arguments(run: RunConfig) -> list[str]:
    data = TokenizedData(Path("d/text"), run.data.vocab_size, run.data.vocab_size - 1, 50, Path("d/cache"))
    machine = Installation(on_cpu=run.training.device == "cpu", has_transformer_engine=False)
    return megatron_arguments(run, data, machine, Path("runs/x"), resume=False)


@pytest.mark.parametrize(
    ("folder", "sections"),
    {
        "": {"model", "data", "parallelism", "training", "strategy"},
        "models": {"model", "data", "training"},
        "parallelism": {"parallelism", "training"},
        "strategies": {"strategy"},
        "training": {"training", "model"},
    }.items(),
)
def test_every_file_has_a_comment_and_its_folders_sections(folder: str, sections: set[str]) -> None:
    assert names_in(folder)
    for name in names_in(folder):
        path = CONFIGS / folder / f"{name}.yaml"
        assert path.read_text(encoding="utf-8").startswith("# "), path
        assert set(compose([path]).layers[-1].data) <= sections, path


# Models of each paper, its clusters, and a training plan.
PAPERS = {
    "hecate": (("hecate-a", "hecate-b"), "measure"),
    "fastermoe": (("johnny",), "measure"),
    "fastermoe-moe-bert-wide": (("trevor",), "measure"),
    "pro-prophet": (("hpnv", "hpwnv"), "measure"),
    "pro-prophet, Table V": (("lpwnv",), "pro-prophet-table-v"),
    "parm": (("parm-b",), "measure"),
    "mixtral": (("h200",), "measure"),
    "deepseek": (("h200",), "measure"),
    "deepseek-v3": (("h200-deepseek-v3",), "measure"),
    "gpt-oss": (("h200",), "measure"),
    "qwen3": (("h200",), "measure"),
    "tiny": (("cpu",), "tiny"),
}
COMBINATIONS = [
    (f"models/{model}", f"parallelism/{cluster}", f"training/{plan}")
    for paper, (clusters, plan) in PAPERS.items()
    for model, cluster in product(names_in("models"), clusters)
    if model.startswith(paper.partition(",")[0])
]
"""The batch is that of the papers: the model's micro-batch on every data-parallel rank."""


def test_every_part_is_used() -> None:
    used = {name for parts in COMBINATIONS for name in parts} | {"parallelism/parm-a"}
    assert used == {
        f"{folder}/{name}" for folder in ("models", "parallelism", "training") for name in names_in(folder)
    }
    chosen = {
        load_run([*COMBINATIONS[0], f"strategies/{name}"]).strategy.name for name in names_in("strategies")
    }
    assert chosen == set(STRATEGIES)


@pytest.mark.parametrize(("number", "parts"), [*enumerate(COMBINATIONS)], ids=map(" ".join, COMBINATIONS))
def test_every_model_runs_on_its_clusters(number: int, parts: tuple[str, ...]) -> None:
    """Each combination has another strategy, so all of them are used."""
    strategies = [name for name in names_in("strategies") if name != "none"]
    run = load_run([*parts, f"strategies/{strategies[number % len(strategies)]}"])
    words = arguments(run)
    for flag, value in (
        ("--moe-strategy", run.strategy.name),
        ("--moe-ffn-hidden-size", run.model.moe_ffn_hidden_size),
        ("--num-experts", run.model.num_experts),
        ("--expert-model-parallel-size", run.parallelism.expert_model_parallel_size),
    ):
        assert words.count(flag) == 1
        assert words[words.index(flag) + 1] == str(value)
    assert run.model.family == ("bert" if "bert" in parts[0] else "gpt")
    assert ("--tokenizer-model" in words) == ("bert" in parts[0])


@pytest.mark.parametrize("name", names_in("clusters"))
def test_every_figure_of_a_cluster_has_a_source(name: str) -> None:
    cluster = load_cluster(CONFIGS / "clusters" / f"{name}.yaml")
    cut = compose([f"parallelism/{name}"]).data["parallelism"]
    assert (cut.get("num_nodes", 1), cut["nproc_per_node"]) == (cluster.num_nodes, cluster.devices_per_node)
    figures = set(ClusterDescription.model_fields) - {"name", "sources"}
    assert {figure for figure in figures if getattr(cluster, figure) not in (None, {})} <= set(
        cluster.sources
    )
    inside = cluster.devices_per_node * cluster.intra_node.bandwidth_bytes_per_s
    assert cluster.name == name
    assert cluster.inter_node.bandwidth_bytes_per_s <= inside


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
    "deepseek-v3": (36.6 + 0.93, 0.05),  # the stated 36.6 leave out the embeddings
    "qwen3-235b-a22b": (22, 0.5),
    "gpt-oss-120b": (5.13 + 0.58, 0.005),  # the stated 5.13 leave out the embeddings
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


# Layers, embedding and hidden size in Pro-Prophet's Table III.
TABLE_III = {
    **{"s": (12, 512, 1024), "m": (12, 1024, 2048), "l": (12, 2048, 4096)},
    **{"ds": (24, 512, 1024), "dm": (24, 1024, 2048)},
}


@pytest.mark.parametrize("name", TABLE_III)
def test_pro_prophets_models_are_those_of_its_table_iii(name: str) -> None:
    model = load_run([f"models/pro-prophet-moe-gpt-{name}", "training/tiny"]).model
    assert (model.num_layers, model.hidden_size, model.moe_ffn_hidden_size) == TABLE_III[name]
    assert all(model.moe_layers)


@pytest.mark.parametrize(
    ("name", "millions", "tolerance"),
    [("parm-gpt2", 124.4, 0.2), ("parm-bert-base", 110, 0.5)],  # biases are 0.1 M; Devlin et al. 2019, §3
)
def test_parms_models_without_experts_are_those_of_their_papers(
    name: str, millions: float, tolerance: float
) -> None:
    model = load_run([f"models/{name}", "training/tiny"]).model
    gates = sum(model.moe_layers) * model.hidden_size * (model.num_experts or 0)
    assert (counted(name).activated - gates) / 1e6 == pytest.approx(millions, abs=tolerance)
