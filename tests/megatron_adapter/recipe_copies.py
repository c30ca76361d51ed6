"""Small copies of Megatron-LM's recipes with experts, which train on a few CPU ranks."""

from dataclasses import dataclass

from .recipes import KEPT, Flags, Recipe, words_of
from .training_run import SMALL

TINY = f"{SMALL} --moe-ffn-hidden-size 32"
NUM_ITERATIONS = 6


@dataclass(frozen=True)
class SmallCopy:
    """A recipe, scaled down for CPU ranks: their number, and a command line without data and strategy."""

    num_ranks: int
    arguments: str


def small_copy(recipe: Recipe) -> SmallCopy:
    """Return a recipe with small sizes on at most eight ranks.

    Its features stay. Parallel sizes become at most 2 or 4.
    """
    flags = {flag: value for flag, value in recipe.flags.items() if flag in KEPT}
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
    return SmallCopy(
        per_stage * pipeline, f"{TINY} {' '.join(words_of(flags))} --train-iters {NUM_ITERATIONS}"
    )


def _layers(recipe: Recipe, pipeline: int) -> Flags:
    """Return flags for one layer in each model chunk, but at least two layers."""
    flags: Flags = {}
    later = recipe.size("--mtp-num-layers", 0)
    layout = recipe.flags.get("--pipeline-model-parallel-layout")
    virtual = recipe.size("--num-virtual-stages-per-pipeline-rank")
    if "--num-layers-per-virtual-pipeline-stage" in recipe.flags:
        virtual = 2
    if layout is not None and layout.count("|") + 1 == recipe.size("--pipeline-model-parallel-size"):
        virtual = 1
    elif layout is not None:
        virtual = 2
    chunks = min(virtual, 2) if pipeline > 1 else 1
    num_layers = 2 * pipeline
    if layout is not None:
        layers = num_layers // (pipeline * chunks)
        stages = ["t" * layers] * (pipeline * chunks)
        flags["--pipeline-model-parallel-layout"] = f"E{'|'.join(stages)}{'m' * later}L"
    elif chunks > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = chunks
    flags["--num-layers"] = num_layers
    if later:
        flags["--mtp-num-layers"] = later
    frequency = str(recipe.flags.get("--moe-layer-freq", "1"))
    if "0" in frequency:
        flags["--moe-layer-freq"] = f"([0]*1+[1]*{num_layers - 1})"
    return flags


def _experts(recipe: Recipe) -> Flags:
    flags: Flags = {"--num-experts": min(recipe.size("--num-experts"), 16)}
    flags["--moe-router-topk"] = min(recipe.size("--moe-router-topk", 2), 4)
    if "--moe-router-num-groups" in recipe.flags:
        flags |= {"--moe-router-num-groups": 4, "--moe-router-group-topk": 2}
    if "--moe-shared-expert-intermediate-size" in recipe.flags:
        flags["--moe-shared-expert-intermediate-size"] = 32
    return flags


def _attention(recipe: Recipe) -> Flags:
    flags: Flags = {}
    if "--num-query-groups" in recipe.flags:
        flags["--num-query-groups"] = 2
    if "--multi-latent-attention" in recipe.flags:
        flags |= {"--kv-lora-rank": 16, "--qk-head-dim": 8, "--qk-pos-emb-head-dim": 8, "--v-head-dim": 8}
        if "--q-lora-rank" in recipe.flags:
            flags["--q-lora-rank"] = 16
    return flags
