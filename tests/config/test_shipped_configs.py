from functools import cache
from itertools import product

import pytest

from megatron_fssdp.config.cluster_description import ClusterDescription, load_cluster
from megatron_fssdp.config.run.composition import compose, load_run
from megatron_fssdp.config.run.parameter_count import count_parameters
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from tests.support.python_process import ROOT

from ..launch.tiny_run import arguments_of

CONFIGS = ROOT / "configs"


def names_in(folder):
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.yaml"))


@cache
def counted(model):
    run = load_run([f"models/{model}", "training/tiny"])
    return count_parameters(run.model, run.data.vocab_size)


@pytest.mark.parametrize(
    ("folder", "sections"),
    [
        ("", "model data parallelism training strategy"),
        ("models", "model data training"),
        ("parallelism", "parallelism training"),
        ("strategies", "strategy"),
        ("training", "training model"),
    ],
)
def test_every_file_has_a_comment_and_its_folders_sections(folder, sections):
    assert names_in(folder)
    for name in names_in(folder):
        path = CONFIGS / folder / f"{name}.yaml"
        assert path.read_text(encoding="utf-8").startswith("# "), path
        assert {*compose([path]).layers[-1].settings} <= {*sections.split()}, path


# Models of each paper, its clusters, and a training plan.
PAPERS = {
    "hecate": (("hecate-a", "hecate-b"), "measure"),
    "fastermoe": (("johnny",), "measure"),
    "fastermoe-moe-bert-wide": (("trevor",), "measure"),
    "pro-prophet": (("hpnv", "hpwnv"), "measure"),
    "pro-prophet, Table V": (("lpwnv",), "pro-prophet-table-v"),
    "parm": (("parm-b",), "measure"),
    **dict.fromkeys(("mixtral", "deepseek", "gpt-oss", "qwen3"), (("h200",), "measure")),
    "deepseek-v3": (("h200-deepseek-v3",), "measure"),
    "tiny": (("cpu",), "tiny"),
}
COMBINATIONS = [
    (f"models/{model}", f"parallelism/{cluster}", f"training/{plan}")
    for paper, (clusters, plan) in PAPERS.items()
    for model, cluster in product(names_in("models"), clusters)
    if model.startswith(paper.partition(",")[0])
]
"""The batch is that of the papers: the model's micro-batch on every data-parallel rank."""


def test_every_part_is_used():
    used = {name for parts in COMBINATIONS for name in parts} | {"parallelism/parm-a"}
    folders = ("models", "parallelism", "training")
    assert used == {f"{folder}/{name}" for folder in folders for name in names_in(folder)}
    runs = [load_run([*COMBINATIONS[0], f"strategies/{name}"]) for name in names_in("strategies")]
    assert {run.strategy.name for run in runs} == set(STRATEGIES)


@pytest.mark.parametrize(("number", "parts"), [*enumerate(COMBINATIONS)], ids=map(" ".join, COMBINATIONS))
def test_every_model_runs_on_its_clusters(number, parts):
    """Each combination has another strategy, so all of them are used."""
    strategies = [name for name in names_in("strategies") if name != "none"]
    run = load_run([*parts, f"strategies/{strategies[number % len(strategies)]}"])
    words = arguments_of(run)
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
def test_every_figure_of_a_cluster_has_a_source(name):
    cluster = load_cluster(CONFIGS / "clusters" / f"{name}.yaml")
    cut = compose([f"parallelism/{name}"]).settings["parallelism"]
    assert (cut.get("num_nodes", 1), cut["nproc_per_node"]) == (cluster.num_nodes, cluster.devices_per_node)
    figures = set(ClusterDescription.model_fields) - {"name", "sources"}
    assert {figure for figure in figures if getattr(cluster, figure) not in (None, {})} <= {*cluster.sources}
    inside = cluster.devices_per_node * cluster.intra_node.bandwidth_bytes_per_s
    assert cluster.name == name
    assert cluster.inter_node.bandwidth_bytes_per_s <= inside


# The stated numbers in billions, by what they count.
STATED = {
    "matrices_of_layers": (
        "hecate-gpt-moe-s 1.84, hecate-gpt-moe-l 7.36, hecate-bert-moe 3.27, hecate-bert-moe-deep 6.54, "
        "fastermoe-moe-gpt-s 0.86, fastermoe-moe-gpt 3.42, fastermoe-moe-gpt-l 13.7, "
        "fastermoe-moe-bert-deep 1.71, fastermoe-moe-bert-deep-l 27.4, fastermoe-moe-bert-wide 3.27, "
        "fastermoe-moe-bert-wide-l 13.1"
    ),
    "total": (
        "mixtral-8x7b 46.7, mixtral-8x22b 141, deepseekmoe-16b 16.4, qwen3-30b-a3b 30.5, "
        "qwen3-235b-a22b 235, gpt-oss-120b 116.83"
    ),
    "main_model": "deepseek-v3 671",
    "activated": "mixtral-8x7b 12.9, mixtral-8x22b 39, deepseekmoe-16b 2.8, qwen3-235b-a22b 22",
}
SIZES = [(name, *size.split()) for name, models in STATED.items() for size in models.split(", ")]
PARM_GATES = 12 * 768 * 8 / 1e9  # which models without experts do not have


@pytest.mark.parametrize(("quantity", "model", "billions"), SIZES)
def test_models_have_the_stated_sizes(quantity, model, billions):
    half_of_last_digit = 0.5 / 10 ** len(billions.partition(".")[2])
    assert getattr(counted(model), quantity) / 1e9 == pytest.approx(float(billions), abs=half_of_last_digit)


@pytest.mark.parametrize(
    ("quantity", "model", "billions", "tolerance"),
    [
        ("activated", "parm-gpt2", 0.1244 + PARM_GATES, 0.0002),  # biases are 0.1 M
        ("activated", "parm-bert-base", 0.110 + PARM_GATES, 0.0005),  # Devlin et al. 2019, §3
        ("activated", "deepseek-v3", 36.6 + 0.93, 0.05),  # the stated 36.6 leave out the embeddings
        ("activated", "gpt-oss-120b", 5.13 + 0.58, 0.005),  # the stated 5.13 leave out the embeddings
        ("activated", "qwen3-30b-a3b", 3.3, 0.06),  # 3.35; without gates it would be 3.34
        # DeepSeek's description of its weights states 11.5 for the layer and its projection, without norms.
        ("multi_token_prediction", "deepseek-v3", 11.6, 0.1),
    ],
)
def test_sizes_that_are_stated_differently(quantity, model, billions, tolerance):
    assert getattr(counted(model), quantity) / 1e9 == pytest.approx(billions, abs=tolerance)


# Layers, embedding and hidden size in Pro-Prophet's Table III.
TABLE_III = {
    **{"s": (12, 512, 1024), "m": (12, 1024, 2048), "l": (12, 2048, 4096)},
    **{"ds": (24, 512, 1024), "dm": (24, 1024, 2048)},
}


@pytest.mark.parametrize("name", TABLE_III)
def test_pro_prophets_models_are_those_of_its_table_iii(name):
    model = load_run([f"models/pro-prophet-moe-gpt-{name}", "training/tiny"]).model
    assert (model.num_layers, model.hidden_size, model.moe_ffn_hidden_size) == TABLE_III[name]
    assert all(model.moe_layers)
