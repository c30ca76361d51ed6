"""What a placement strategy cannot serve (yet), refused before it could go silently wrong.

The same table reads command-line arguments and a ``TransformerConfig``: where both have
a setting, both call it by the same name.
"""

from collections.abc import Callable, Iterable
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError

Value = Callable[[str], Any]

Refusal = tuple[str, Callable[[Value], bool], str]
"""What is refused, when, and the next step."""

REFUSALS: tuple[Refusal, ...] = (
    (
        "biases of experts under expert tensor parallelism",
        # Megatron refuses them too, with an assertion. Its default is the tensor-parallel size.
        lambda value: (
            (value("expert_tensor_parallel_size") or value("tensor_model_parallel_size") or 1) > 1
            and bool(value("add_bias_linear"))
        ),
        "add --disable-bias-linear, or --expert-tensor-parallel-size 1",
    ),
    (
        "biases of experts under sequence parallelism",
        # Megatron 0.19 sums the output biases' gradients over the tensor-parallel ranks, where with
        # whole experts they belong to different ones: what is learnt depends on who owns what.
        lambda value: (
            bool(value("sequence_parallel"))
            and (value("tensor_model_parallel_size") or 1) > 1
            and bool(value("add_bias_linear"))
        ),
        "add --disable-bias-linear",
    ),
    (
        "the flex token dispatcher",
        lambda value: value("moe_token_dispatcher_type") == "flex",
        "the strategy brings its own dispatcher: use --moe-token-dispatcher-type alltoall",
    ),
    (
        "--moe-shared-expert-overlap",
        lambda value: bool(value("moe_shared_expert_overlap")),
        "the strategy's dispatcher does not interleave the shared expert: drop the flag",
    ),
    (
        "--overlap-moe-expert-parallel-comm",
        lambda value: bool(value("overlap_moe_expert_parallel_comm")),
        "it replaces the layer's forward pass: drop the flag",
    ),
    (
        "delayed weight gradients of experts",
        lambda value: bool(
            value("delay_wgrad_compute") or value("overlap_dispatch_backward_with_experts_wgrad")
        ),
        "the strategy owns the experts' gradients: drop the flag",
    ),
    (
        "fp8 or fp4 experts",
        lambda value: bool(value("fp8") or value("fp4")),
        "replicas travel in bf16, fp16 or fp32: drop the fp8/fp4 flags",
    ),
    (
        "CUDA graphs",
        lambda value: (value("cuda_graph_impl") or "none") != "none",
        "placements change between iterations: use --cuda-graph-impl none",
    ),
    (
        "Transformer Engine's activation functions",
        lambda value: bool(value("use_te_activation_func")),
        "drop --use-te-activation-func",
    ),
    (
        "Transformer Engine's fused grouped MLP",
        lambda value: bool(value("use_transformer_engine_op_fuser")),
        "drop --use-transformer-engine-op-fuser",
    ),
    (
        "one weight tensor for all experts",
        lambda value: bool(value("moe_single_grouped_weight") or value("moe_single_grouped_bias")),
        "experts are sharded one by one: drop the flag",
    ),
    (
        "fully sharded data parallelism of the whole model",
        lambda value: bool(value("use_megatron_fsdp") or value("use_torch_fsdp2")),
        "use Megatron's DDP, with or without --use-distributed-optimizer",
    ),
    (
        "expert weight rematerialization over GTP",
        lambda value: (value("expert_gtp_weight_remat_size") or 1) > 1,
        "drop the option",
    ),
    (
        "recompute of moe_act alone",
        lambda value: (
            value("recompute_granularity") == "selective" and "moe_act" in (value("recompute_modules") or ())
        ),
        "recompute 'moe' instead, or the full layer",
    ),
    (
        "fine-grained activation offloading of experts",
        lambda value: (
            bool(value("fine_grained_activation_offloading"))
            and any("expert" in module or "moe" in module for module in (value("offload_modules") or ()))
        ),
        "leave the expert modules out of --offload-modules",
    ),
    (
        "paged stashing",
        lambda value: bool(value("moe_paged_stash")),
        "drop --moe-paged-stash",
    ),
    (
        "the inference-optimized implementation",
        lambda value: value("transformer_impl") == "inference_optimized",
        "use --transformer-impl local or transformer_engine",
    ),
)
"""What no placement strategy can serve."""


RESIDENT_REFUSALS: tuple[Refusal, ...] = (
    (
        "fp16, whose loss scale decides about a step",
        lambda value: bool(value("fp16")),
        "its replicas step by themselves: use --bf16 or fp32",
    ),
    (
        "--calculate-per-token-loss",
        lambda value: bool(value("calculate_per_token_loss")),
        "gradients of its replicas are scaled before the number of tokens is known: drop the flag",
    ),
)
"""What a strategy with optimizer states of replicas cannot serve beside."""


def refuse(who: str, refusals: Iterable[Refusal], settings: Any) -> None:
    """Raise at the first thing that is refused.

    Args:
        who: Starts the message.
        refusals: What is.
        settings: Megatron's parsed arguments or a ``TransformerConfig``.

    Raises:
        ConfigurationError: With what is refused and what to do.
    """
    for what, is_refused, advice in refusals:
        if is_refused(lambda name: getattr(settings, name, None)):
            raise ConfigurationError(f"{who} does not support {what}: {advice}")


def check_supported(strategy: str, settings: Any) -> None:
    """Refuse what the strategy's layer would compute wrongly or not at all.

    Args:
        strategy: Name of the strategy, for the message.
        settings: Megatron's parsed arguments or a ``TransformerConfig``.

    Raises:
        ConfigurationError: With what is refused and what to do.
    """

    def value(name: str) -> Any:
        return getattr(settings, name, None)

    refuse(f"--moe-strategy {strategy}", REFUSALS, settings)
    num_experts = value("num_moe_experts") or value("num_experts")
    if not num_experts:
        raise ConfigurationError(
            f"--moe-strategy {strategy} needs a Mixture-of-Experts model: add --num-experts, "
            "or use --moe-strategy none"
        )
    expert_parallel = value("expert_model_parallel_size") or 1
    if num_experts % expert_parallel:
        raise ConfigurationError(
            f"--expert-model-parallel-size: got {expert_parallel}, wanted a divisor of the "
            f"{num_experts} experts; change it or --num-experts"
        )
