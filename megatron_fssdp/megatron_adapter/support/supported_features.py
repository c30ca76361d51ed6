"""Features of Megatron that a placement strategy does not support.

They are refused before a run starts, because their results would be wrong without a warning. The same table
serves command-line arguments and a ``TransformerConfig``: settings that exist in both have the same name.
"""

from collections.abc import Callable, Iterable
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError

Value = Callable[[str], Any]
"""Function from the name of a setting to its value; ``None`` if the setting does not exist."""

Refusal = tuple[str, Callable[[Value], bool], str]
"""Name of the refused feature; whether settings ask for it; the next step for the user."""


def value_of(settings: Any) -> Value:
    """Return the values of Megatron's parsed arguments or of a ``TransformerConfig`` by name."""
    return lambda name: getattr(settings, name, None)


def tensor_parallel(value: Value) -> int:
    """Return the number of tensor-parallel ranks."""
    return value("tensor_model_parallel_size") or 1


def expert_parts(value: Value) -> int:
    """Return the number of ranks that share an expert: by default, the tensor-parallel ranks."""
    return value("expert_tensor_parallel_size") or tensor_parallel(value)


def captured_modules(value: Value) -> frozenset[str]:
    """Return the names of the modules that CUDA graphs capture; empty without graphs, or for whole layers."""
    if not _uses_graphs(value):
        return frozenset()
    modules = value("cuda_graph_modules") or value("cuda_graph_scope_deprecated") or ()
    if isinstance(modules, str) or hasattr(modules, "name"):
        modules = (modules,)
    return frozenset(str(getattr(module, "name", module)) for module in modules) - {"full"}


def asks_any(*names: str) -> Callable[[Value], bool]:
    """Return whether settings have any of the named ones, as a function of their values."""
    return lambda value: any(map(value, names))


def _uses_graphs(value: Value) -> bool:
    has_old_flag = value("enable_cuda_graph") or value("external_cuda_graph")
    return (value("cuda_graph_impl") or "none") != "none" or bool(has_old_flag)


def _num_weight_shards(value: Value) -> int:
    """Return into how many parts GTP divides a weight of an expert, beside expert tensor parallelism."""
    if (size := value("expert_gtp_weight_remat_size") or 1) > 1:
        return int(size)
    parts = expert_parts(value)
    return int((value("expert_tensor_parallel_num_weight_shards") or parts) // parts)


REFUSALS: tuple[Refusal, ...] = (
    (
        "biases of experts under expert tensor parallelism",
        # Megatron refuses them too, by an assertion.
        lambda value: expert_parts(value) > 1 and bool(value("add_bias_linear")),
        "add --disable-bias-linear, or --expert-tensor-parallel-size 1",
    ),
    (
        "biases of experts under sequence parallelism",
        # Megatron 0.19 sums the gradients of output biases over the tensor-parallel ranks. With whole
        # experts, these ranks own different experts, so the result would depend on who owns what.
        lambda value: bool(
            value("sequence_parallel") and tensor_parallel(value) > 1 and value("add_bias_linear")
        ),
        "add --disable-bias-linear",
    ),
    (
        "parameters in fp8 or fp4",
        asks_any("fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather"),
        "weights travel to replicas in bf16, fp16 or fp32, and Transformer Engine quantizes them there: "
        "remove --fp8-param-gather and --fp4-param-gather",
    ),
    (
        "delayed scaling in fp8",
        # Its histories of maxima belong to the position of an expert in the module. Under a strategy, a
        # position has other experts from iteration to iteration.
        lambda value: bool(value("fp8")) and value("fp8_recipe") == "delayed",
        "its scales come from earlier iterations, and a device computes other experts in each of them: use "
        "--fp8-recipe tensorwise, blockwise or mxfp8",
    ),
    (
        "fp8 or fp4 without grouped experts",
        lambda value: asks_any("fp8", "fp4")(value) and not value("moe_grouped_gemm"),
        "add --moe-grouped-gemm",
    ),
    (
        "CUDA graphs of an iteration, a layer or an MoE layer, and --cuda-graph-impl local",
        # Local graphs contain the end of a layer, where the next transfers start.
        lambda value: (
            value("cuda_graph_impl") in ("full_iteration", "local")
            or bool(value("enable_cuda_graph"))
            or (_uses_graphs(value) and (not captured_modules(value) or "moe" in captured_modules(value)))
        ),
        "transfers and experts change between iterations: use --cuda-graph-impl transformer_engine with "
        "--cuda-graph-modules attn, mlp, mamba, moe_router or moe_preprocess, or --cuda-graph-impl none",
    ),
    (
        "CUDA graphs of the router (--cuda-graph-modules moe_router) under tensor parallelism without "
        "sequence parallelism",
        lambda value: (
            "moe_router" in captured_modules(value)
            and tensor_parallel(value) > 1
            and not value("sequence_parallel")
        ),
        "there the strategy divides the tokens around the router: add --sequence-parallel, or remove "
        "moe_router",
    ),
    (
        "one weight tensor for all experts",
        asks_any("moe_single_grouped_weight", "moe_single_grouped_bias"),
        "each expert has its own owner: remove --moe-single-grouped-weight and --moe-single-grouped-bias",
    ),
    (
        "fully sharded data parallelism of the whole model",
        asks_any("use_megatron_fsdp", "use_torch_fsdp2"),
        "use Megatron's DDP, with or without --use-distributed-optimizer",
    ),
    (
        "expert weight rematerialization over GTP",
        lambda value: _num_weight_shards(value) > 1,
        "remove --expert-tensor-parallel-num-weight-shards",
    ),
    ("paged stashing", asks_any("moe_paged_stash"), "remove --moe-paged-stash"),
    (
        "the inference-optimized implementation",
        lambda value: value("transformer_impl") == "inference_optimized",
        "use --transformer-impl local or transformer_engine",
    ),
)
"""Features that no placement strategy supports."""


def refuse(who: str, refusals: Iterable[Refusal], settings: Any) -> None:
    """Raise for the first refused feature that Megatron's arguments or a ``TransformerConfig`` ask for.

    ``who`` starts the message of the ConfigurationError: what does not support the feature.
    """
    for what, is_refused, advice in refusals:
        if is_refused(value_of(settings)):
            raise ConfigurationError(f"{who} does not support {what}: {advice}")


def check_supported(strategy: str, settings: Any) -> None:
    """Refuse settings under which the layer of the strategy would fail or compute wrong results.

    Raises:
        ConfigurationError: The settings ask for a refused feature, the model has no experts or fewer than a
            token selects, or the experts cannot be divided evenly among the expert-parallel ranks.
    """
    refuse(f"--moe-strategy {strategy}", REFUSALS, settings)
    value = value_of(settings)
    num_experts = value("num_moe_experts") or value("num_experts")
    if not num_experts:
        raise ConfigurationError(
            f"--moe-strategy {strategy} needs a Mixture-of-Experts model: add --num-experts, "
            "or use --moe-strategy none"
        )
    top_k = value("moe_router_topk") or 0
    if top_k > num_experts:  # Megatron itself finds it in the first iteration, by an error of torch.topk.
        raise ConfigurationError(
            f"--moe-router-topk: got {top_k}, wanted at most the {num_experts} experts; change it or "
            "--num-experts"
        )
    expert_parallel = value("expert_model_parallel_size") or 1
    if num_experts % expert_parallel:
        raise ConfigurationError(
            f"--expert-model-parallel-size: got {expert_parallel}, wanted a divisor of the "
            f"{num_experts} experts; change it or --num-experts"
        )
