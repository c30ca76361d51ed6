"""Megatron-LM's own training recipes: the table of docs/compatibility.md is true.

The tests need a Megatron-LM checkout (``MEGATRON_LM_PATH``). A small copy of a recipe trains on a few CPU
ranks, with stand-ins for the linear layers of Transformer Engine (``grouped_linear.py``) and for the kernels
of DeepEP and HybridEP (``fused_dispatch.py``). It keeps every flag that is in none of the tables below, so
that a new feature of Megatron is trained. All copies take most of an hour on two cores.
"""

import os
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.docs import recipes
from scripts.docs.recipes import LEFT_OUT, words_of

from .fused_dispatch import install_fused_dispatch
from .training.parity.test_prepared_trainings import build_grouped_experts
from .training.parity.test_strategy_parity import cheap_links
from .training_run import SMALL, flags, relative_difference, train

CHECKOUT = os.environ.get(recipes.VARIABLE)
FOUND = recipes.recipes(Path(CHECKOUT)) if CHECKOUT else []
needs_checkout = pytest.mark.skipif(not CHECKOUT, reason=f"needs a Megatron-LM checkout ({recipes.VARIABLE})")

STRATEGIES = (
    "fssdp slots=2 overlap_degree=2 reshard_interval=2",
    "auto choice_interval=1 FSSDP_PROFILE_ITERATIONS=1",
)
TOLERANCE = {True: 2e-3, False: 3e-5}


# Patterns of flags whose value a small copy sets itself.
SCALED = """
    --*parallel-size --*hidden-size --kv-channels --kv-lora-rank --max-position-embeddings --*batch-size
    --moe-layer-freq --moe-router-*group* --moe-router-topk --moe-shared-expert-intermediate-size
    --num-experts --num-attention-heads --*num-layers --num-layers-per-virtual-* --num-query-groups
    --num-virtual-stages-* --pipeline-model-parallel-layout --q-lora-rank --qk-*dim --seq-length --v-head-dim
"""

# Patterns of flags that do not change what is computed: data, length and learning rate of the training,
# checkpoints, logs, and kernels with the same results; and of parts of the features below.
IRRELEVANT = """
    --adam-beta? --apply-wd-* --async-* --attention-backend --auto-detect-* --check-weight-* --ckpt-*
    --cross-entropy-* --cuda-graph-* --data-* --deterministic-mode --disable-gloo-* --dist-ckpt-*
    --distributed-* --enable-experimental --eval-* --exit-* --finetune --first-last-layers-bf16 --fp8-*
    --high-priority-* --load --log-* --logging-level --lr* --make-vocab-* --manual-gc* --merge-file --min-lr
    --moe-hybridep-* --moe-permute-fusion --moe-router-fusion --moe-router-padding-* --no-bias-gelu-fusion
    --no-ckpt-* --no-create-* --no-gradient-* --no-mmap-* --no-rope-fusion --num-layers-at-* --num-workers
    --offload-* --override-* --reuse-grad-* --save* --split --te-rng-tracker --tensorboard-dir --tiktoken-*
    --timing-* --tokenizer-* --train-* --transformer-impl --use-checkpoint-* --use-flash-attn
    --use-mcore-models --use-persistent-* --verify-integrity --vocab-file --wandb-*
"""


@dataclass(frozen=True)
class SmallCopy:
    """A recipe, scaled down for CPU ranks: their number, and a command line without data and strategy."""

    num_ranks: int
    arguments: str


def small_copy(recipe):
    """Return a recipe with its features and small sizes, on at most eight ranks."""
    dropped = (*SCALED.split(), *IRRELEVANT.split(), *LEFT_OUT)
    kept = (flag for flag in recipe.flags if not any(fnmatch(flag, pattern) for pattern in dropped))
    flags = {flag: recipe.flags[flag] for flag in kept}
    # With this order of ranks, experts and attention must have equal data-parallel sizes.
    most = 4 if "--use-tp-pp-dp-mapping" in recipe.flags else 2
    tensor = min(recipe.size("--tensor-model-parallel-size"), most)
    pipeline = min(recipe.size("--pipeline-model-parallel-size"), 2)
    parts = min(recipe.size("--expert-tensor-parallel-size", tensor), 2)
    # Each instance of the optimizer needs an expert-data-parallel rank of its own.
    per_stage = 4 * min(recipe.size("--num-distributed-optimizer-instances"), 2)
    expert = min(recipe.size("--expert-model-parallel-size"), 4 // parts)
    flags |= {
        "--tensor-model-parallel-size": tensor,
        "--pipeline-model-parallel-size": pipeline,
        "--expert-model-parallel-size": expert,
        "--expert-tensor-parallel-size": parts,
        "--global-batch-size": 2 * (per_stage // tensor) * (2 * pipeline),
    }
    flags |= _layers(recipe, pipeline) | _experts(recipe) | _attention(recipe)
    if tensor == 1:
        flags.pop("--sequence-parallel", None)
    arguments = f"{SMALL} --moe-ffn-hidden-size 32 {' '.join(words_of(flags))} --train-iters 6"
    return SmallCopy(per_stage * pipeline, arguments)


def _layers(recipe, pipeline):
    """Return flags for one layer in each model chunk, but at least two layers."""
    later, num_layers = recipe.size("--mtp-num-layers", 0), 2 * pipeline
    layout = recipe.flags.get("--pipeline-model-parallel-layout")
    virtual = recipe.size("--num-virtual-stages-per-pipeline-rank")
    if layout is not None:
        virtual = 1 if layout.count("|") + 1 == recipe.size("--pipeline-model-parallel-size") else 2
    elif "--num-layers-per-virtual-pipeline-stage" in recipe.flags:
        virtual = 2
    chunks = min(virtual, 2) if pipeline > 1 else 1
    flags = {"--num-layers": num_layers}
    if layout is not None:
        stages = ["t" * (num_layers // (pipeline * chunks))] * (pipeline * chunks)
        flags["--pipeline-model-parallel-layout"] = f"E{'|'.join(stages)}{'m' * later}L"
    elif chunks > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = chunks
    if later:
        flags["--mtp-num-layers"] = later
    if "0" in str(recipe.flags.get("--moe-layer-freq", "1")):
        flags["--moe-layer-freq"] = f"([0]*1+[1]*{num_layers - 1})"
    return flags


def _experts(recipe):
    topk = min(recipe.size("--moe-router-topk", 2), 4)
    flags = {"--num-experts": min(recipe.size("--num-experts"), 16), "--moe-router-topk": topk}
    if "--moe-router-num-groups" in recipe.flags:
        flags |= {"--moe-router-num-groups": 4, "--moe-router-group-topk": 2}
    return flags


def _attention(recipe):
    sizes = {"--num-query-groups": 2, "--moe-shared-expert-intermediate-size": 32}
    latent = {}
    if "--multi-latent-attention" in recipe.flags:
        sizes["--q-lora-rank"] = 16
        latent = {"--kv-lora-rank": 16, "--qk-head-dim": 8, "--qk-pos-emb-head-dim": 8, "--v-head-dim": 8}
    return {flag: size for flag, size in sizes.items() if flag in recipe.flags} | latent


@needs_checkout
@pytest.mark.slow
def test_the_table_is_that_of_the_code():
    assert len(FOUND) == 68
    page = recipes.PAGE.read_text(encoding="utf-8")
    assert recipes.written_table(page) == recipes.table(FOUND)


def _small_copies():
    """The different small copies, by the name of the first recipe with each of them."""
    names = {}
    for recipe in FOUND:
        if recipe.obstacle is None:
            names.setdefault(small_copy(recipe), recipe.name)
    return {name: copy for copy, name in names.items()}


@needs_checkout
@pytest.mark.slow
# Without these identifiers, pytest numbers the longest names.
@pytest.mark.parametrize("name", _small_copies(), ids=list(_small_copies()))
def test_a_small_copy_trains_with_stock_losses(name, text_data):
    if refused := recipes.refusal(next(recipe for recipe in FOUND if recipe.name == name)):
        pytest.skip(f"refused: {refused}")
    copy = _small_copies()[name]
    for flag, package in (("muon", "emerging_optimizers"), ("instances 2", "einops")):
        if flag in copy.arguments and find_spec(package) is None:
            pytest.skip(f"Megatron needs {package} for this optimizer")
    stock = _train(copy, "", text_data)
    is_half = "--bf16" in copy.arguments or "--fp16" in copy.arguments
    for strategy in STRATEGIES:
        ours = _train(copy, flags(strategy), text_data)
        difference = relative_difference(ours.losses, stock.losses)
        print(f"{name}: {strategy}: {difference:.1e}")
        assert difference <= TOLERANCE[is_half], strategy


def _train(copy, more, data):
    before = partial(_prepare, grouped="--moe-grouped-gemm" in copy.arguments)
    return train(copy.num_ranks, f"{copy.arguments} {more}", data, before=before)


def _prepare(*, grouped):
    cheap_links()
    install_fused_dispatch()
    if grouped:
        build_grouped_experts(fuses=False)
