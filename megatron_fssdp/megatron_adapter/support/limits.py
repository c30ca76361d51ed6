"""Settings of Megatron under which a placement strategy would stop, hang or compute wrong results.

They are refused before a run starts.
"""

import math
import os
from collections.abc import Callable, Collection
from typing import NamedTuple

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.megatron_adapter.support.megatron_settings import MegatronSettings, Named
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.auto.auto_strategy import selecting
from megatron_fssdp.strategies.strategy import Strategy

_NODE_RANKS = 8  # DeepEP's number of ranks in a node, a constant of its kernels.
_MOST_IN_NODE, _MOST_OF_NODE = 128, 512  # Threads of its kernels that count tokens, one for each expert.
_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
_DELAYING = "--delay-wgrad-compute and --overlap-dispatch-backward-with-experts-wgrad"


class Limit(NamedTuple):
    """Something that is refused: its name, when it is the case, and the user's next step."""

    code: str  # which stays when the words change
    feature: str
    is_met: Callable[[MegatronSettings, Strategy], object]
    advice: str


def keeps_flex(m: MegatronSettings, s: Strategy) -> bool:
    """Whether tokens travel by Megatron's flex dispatcher: ``auto`` selects a schedule only if it can."""
    return m.flex is not None and (s.travel.schedule == "megatron" or s.selects)


def _plans_micro_batches(s: Strategy) -> bool:
    strategies = (s, *(s.candidates.values() if selecting(s) else ()))
    return any(strategy.replica_life is ReplicaLife.MICRO_BATCH for strategy in strategies)


def _has_fixed_slots(s: Strategy) -> bool:
    # Re-sharding of fssdp moves owners to other numbers for each device.
    has_slots = getattr(s.settings, "slots", None) is not None
    reshards = hasattr(s.settings, "slots") and getattr(s.settings, "reshard_interval", None)
    return (has_slots or not s.may_replicate(1)) and not s.selects and not reshards


# fmt: off
# Megatron refuses biases of divided experts. Under sequence parallelism, Megatron 0.19 sums the gradients of
# output biases over the tensor-parallel ranks. With whole experts, these ranks own different experts, so the
# result would depend on who owns what.
# The histories of delayed scaling belong to the position of an expert in the module, which has other experts
# from iteration to iteration. Local graphs contain the end of a layer, where the next transfers start.
EVERY: tuple[Limit, ...] = (
    Limit("biases_of_sequences", "biases of experts under sequence parallelism",
        lambda m, _: m.tensor_ranks > 1 and not m.equal_tokens and m.add_bias_linear,
        "add --disable-bias-linear, or use --tensor-model-parallel-size 1"),
    Limit("quantized_parameters", "parameters in fp8 or fp4", lambda m, _: m.quantizes_parameters,
        "weights travel to replicas in bf16, fp16 or fp32, and Transformer Engine quantizes them there: "
        "remove --fp8-param-gather and --fp4-param-gather"),
    Limit("kept_scales", "delayed or custom scaling in fp8 or fp4, and quantization of single modules",
        lambda m, _: (m.fp8 and m.fp8_recipe not in ("tensorwise", "blockwise", "mxfp8"))
        or (m.fp4 and m.fp4_recipe == "custom") or m.quantizes_modules,
        "scales come from earlier iterations, and a device computes other experts in each of them: use "
        "--fp8-recipe tensorwise, blockwise or mxfp8, and remove --te-precision-config-file and kitchen"),
    Limit("quantized_single", "fp8 or fp4 without grouped experts",
        lambda m, _: (m.fp8 or m.fp4) and not m.moe_grouped_gemm,
        "add --moe-grouped-gemm"),
    Limit("layer_graphs", "CUDA graphs of an iteration, a layer or an MoE layer, and --cuda-graph-impl local",
        lambda m, _: m.cuda_graph_impl not in (None, "none", "transformer_engine") or m.enable_cuda_graph
        or m.captured & {"full", "moe"},
        "transfers and experts change between iterations: use --cuda-graph-impl transformer_engine with "
        "--cuda-graph-modules attn, mlp, mamba, moe_router or moe_preprocess, or --cuda-graph-impl none"),
    Limit("graph_router", "CUDA graphs of the router (--cuda-graph-modules moe_router) under tensor "
        "parallelism without sequence parallelism",
        lambda m, _: "moe_router" in m.captured and m.equal_tokens,
        "there the strategy divides the tokens around the router: add --sequence-parallel, or remove "
        "moe_router"),
    Limit("grouped_weight", "one weight tensor for all experts", lambda m, _: m.one_grouped_tensor,
        "each expert has its own owner: remove --moe-single-grouped-weight and --moe-single-grouped-bias"),
    Limit("chunks", "layers that compute a micro-batch in chunks", lambda m, _: m.mlp_chunks_for_training > 1,
        "remove --mlp-chunks-for-training"),
    Limit("never_run", "grouped tensors of Transformer Engine, hyper-connections (mHC), mxfp8 or zero copies "
        "in NCCL EP, torch.autocast, and offloading of whole layers",
        lambda m, _: m.never_run or m.sends_mxfp8
        or (m.moe_use_grouped_tensor and not m.use_transformer_engine_op_fuser),
        "never run with experts in slots: remove --moe-use-grouped-tensor, --enable-mhc-connections, "
        "--moe-dispatch-fwd-dtype, --moe-combine-bwd-dtype, --moe-ncclep-zero-copy, enable_autocast and "
        "--cpu-offloading-num-layers"),
    Limit("unknown_dispatcher", "a dispatcher or back end that is not known",
        lambda m, _: m.moe_token_dispatcher_type not in (None, "allgather", "alltoall", "flex")
        or m.flex not in (None, "deepep", "hybridep", "ncclep"),
        "it may limit the number of slots: use --moe-token-dispatcher-type alltoall"),
    Limit("other_ddp", "fully sharded data parallelism of the whole model", lambda m, _: m.other_ddp,
        "use Megatron's DDP: remove --use-megatron-fsdp, --use-torch-fsdp2 and "
        "--init-model-with-meta-device"),
    Limit("gtp", "weight rematerialization over GTP", lambda m, _: m.weight_shards > 1,
        "remove --expert-tensor-parallel-num-weight-shards and --tensor-parallel-num-weight-shards"),
    Limit("cutlass", "grouped products of CUTLASS (NVTE_USE_CUTLASS_GROUPED_GEMM) with --grad-reduce-in-bf16",
        lambda m, _: m.uses_cutlass and m.grad_reduce_in_bf16,
        "they take one data type for the gradients of all experts, and those of replicas are in fp32: unset "
        "the variable, or remove --grad-reduce-in-bf16"),
    Limit("paged_stash", "paged stashing", lambda m, _: m.moe_paged_stash, "remove --moe-paged-stash"),
    Limit("inference", "a --transformer-impl for inference",
        lambda m, _: m.transformer_impl not in (None, "local", "transformer_engine"),
        "use --transformer-impl local or transformer_engine"),
    Limit("saved_rows", "saved activations, data gradients and tokens of experts", lambda m, _: m.saves_slots,
        "the files would have rows of slots under names of experts: remove --save-activations-interval, "
        "--save-dgrads-interval and --save-tokens-per-expert-interval"),
    Limit("other_training", "upcycling, RL, frozen models, restarts in a process, fake groups, and context "
        "parallelism in varying sizes", lambda m, _: m.other_training,
        "plans are for ranks and micro-batches of one training: remove --moe-use-upcycling, "
        "--perform-rl-step, --freeze-all-layers, --inprocess-restart, --fake-process-group and "
        "--hybrid-context-parallel"),
)
"""What every strategy but ``none`` refuses."""

# Transformer Engine calls DDP's hooks of the module in which a Parameter is registered. After a re-shard, the
# Parameter may hold an expert of another layer, whose gradients come later.
SOME: tuple[Limit, ...] = (
    Limit("flex_equal_tokens", "--moe-token-dispatcher-type flex without sequence parallelism",
        lambda m, _: m.flex and m.equal_tokens,
        "there the strategy divides the tokens and sends them itself: add --sequence-parallel"),
    Limit("steps_equal_tokens", "smart_schedule or exchange without sequence parallelism",
        lambda m, s: (s.travel.smart_schedule or s.travel.exchange != "megatron") and m.equal_tokens,
        "there tokens are divided by a schedule of Parm, and each has steps of its own to send them: add "
        "--sequence-parallel, or remove smart_schedule and exchange"),
    Limit("flex_send", "--moe-token-dispatcher-type flex with a schedule, steps or an exchange of the plugin",
        lambda m, s: m.flex and (s.travel.smart_schedule is True or s.travel.exchange == "deduplicated"
                                 or (m.tensor_ranks > 1 and not keeps_flex(m, s))),
        "two dispatchers exclude each other: use --moe-token-dispatcher-type alltoall, or remove schedule, "
        "smart_schedule and exchange"),
    Limit("delay_steps", "delayed weight gradients with smart_schedule",
        lambda m, s: m.delays and s.travel.smart_schedule,
        "its steps run the experts several times in a pass, and Megatron delays the gradients of one run: "
        f"remove {_DELAYING}, or smart_schedule"),
    Limit("delay_passes", "delayed weight gradients with replicas of single micro-batches (fastermoe, quota)",
        lambda m, s: m.delays and _plans_micro_batches(s),
        f"the slots have other experts when the gradients are computed: remove {_DELAYING}"),
    Limit("delay_reshards", "delayed weight gradients with re-sharding",
        lambda m, s: m.delays and s.moves_owners,
        f"DDP would reduce gradients of moved experts before they are computed: {KEEP_OWNERS}, or "
        f"remove {_DELAYING}"),
    Limit("padding_s2", "--moe-router-padding-for-quantization with schedule=s2",
        lambda m, s: m.pads_rows and s.travel.schedule == "s2" and m.equal_tokens,
        "a tensor-parallel rank's share of the padded rows is no multiple: use another schedule"),
    Limit("random_whole", "random logits with schedule=s2 or baseline",
        lambda m, s: m.random_logits and s.travel.schedule in ("s2", "baseline") and m.equal_tokens,
        "tensor-parallel ranks would send the same tokens to different experts: remove "
        "--moe-router-force-load-balancing and --moe-router-force-biased, or use another schedule"),
    Limit("graph_send",
        "--cuda-graph-modules moe_preprocess with a schedule, steps or an exchange of the plugin",
        lambda m, s: m.captures_preprocess and (s.travel.smart_schedule or s.travel.exchange != "megatron"
                                                or (m.tensor_ranks > 1 and s.travel.schedule != "megatron")),
        "they are decided before the graph or wait in it: remove moe_preprocess"),
    Limit("graph_capacity", "--cuda-graph-modules moe_preprocess with an expert capacity",
        lambda m, _: m.captures_preprocess and m.moe_expert_capacity_factor is not None,
        "numbers of rows vary with slots, also of padded experts: remove moe_preprocess"),
    Limit("graph_after_gate",
        "--cuda-graph-modules moe_preprocess with plans after the gate (fastermoe, quota, planner=hecate)",
        lambda m, s: m.captures_preprocess and (_plans_micro_batches(s) or s.asks_after_gate(1)),
        "the graph would have the slots before the plan is made: remove moe_preprocess, or use another "
        "strategy"),
    Limit("graph_slots", "--cuda-graph-modules moe_preprocess without fixed slots",
        lambda m, s: m.captures_preprocess and (s.moves_owners or not _has_fixed_slots(s)),
        "the graph contains their number: set slots and reshard_interval=0, or remove moe_preprocess"),
    Limit("nccl_slots", "--moe-flex-dispatcher-backend ncclep without fixed slots",
        lambda m, s: m.flex == "ncclep" and not _has_fixed_slots(s),
        "NCCL EP has one number of experts in a process: set slots, or use another back end"),
    Limit("latent_tokens", "--moe-latent-size under tensor parallelism without sequence parallelism",
        lambda m, _: m.equal_tokens and m.moe_latent_size,
        "there its projections get only a part of the tokens: add --sequence-parallel"),
    Limit("topology", "router=topology_aware with another selection, a fused kernel or a graph of the router",
        lambda m, s: getattr(s.settings, "router", "stock") == "topology_aware" and (
            m.changes_router or "moe_router" in m.captured
            or m.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing")),
        "remove --moe-router-fusion, --moe-enable-routing-replay, --moe-router-group-topk, sinkhorn, "
        "quantile_balancing and moe_router of --cuda-graph-modules, or use router=stock"),
    Limit("steps_in_parts", "smart_schedule with expert tensor parallelism",
        lambda m, s: s.travel.smart_schedule and m.parts > 1 and m.devices > 1,
        "it needs whole experts: use smart_schedule=false or --expert-tensor-parallel-size 1"),
    Limit("other_states", "--use-precision-aware-optimizer and --optimizer-cuda-graph with re-sharding or "
        "resident replicas (flexmoe)", lambda m, s: (s.moves_owners or s.resident_slots) and m.other_states,
        f"states move in fp32, and these store them in other forms or places: remove them, or {KEEP_OWNERS}"),
    Limit("mup", "MuP with resident replicas (flexmoe)", lambda m, s: s.resident_slots and m.use_mup,
        "replicas would miss its learning rates: remove --use-mup"),
    Limit("fp16", "fp16 with resident replicas (flexmoe)", lambda m, s: s.resident_slots and m.fp16,
        "its loss scale may skip an optimizer step, and replicas have their own: use --bf16 or fp32"),
    Limit("ckpt_format", "a --ckpt-format other than torch_dist with re-sharding",
        lambda m, s: s.moves_owners and m.saves and m.ckpt_format != "torch_dist",
        "only torch_dist stores an expert under its layer and number: use --ckpt-format torch_dist, or "
        f"{KEEP_OWNERS}"),
    Limit("ckpt_convert", "--ckpt-convert-format with re-sharding",
        lambda m, s: s.moves_owners and m.ckpt_convert_format not in (None, "torch_dist"),
        f"convert without a placement strategy (--moe-strategy none), or {KEEP_OWNERS}"),
    Limit("local_ckpt", "--non-persistent-ckpt-type local with re-sharding",
        lambda m, s: s.moves_owners and m.saves and m.non_persistent_ckpt_type == "local",
        f"it stores experts by rank and slot: use --non-persistent-ckpt-type global, or {KEEP_OWNERS}"),
    Limit("saved_by_name", "--save-params-interval and --save-wgrads-interval with re-sharding",
        lambda m, s: s.moves_owners and m.saves_by_name,
        "they save tensors by the names of Parameters, which hold other experts after a re-shard: remove "
        f"them, or {KEEP_OWNERS}"),
)
"""What some strategies and settings refuse."""
# fmt: on


def check_limits(name: str, strategy: Strategy, m: MegatronSettings) -> None:
    """Refuse, by a ConfigurationError, settings of a model that the strategy of this name cannot serve."""
    who = f"--moe-strategy {name}"
    for _, feature, is_met, advice in (*EVERY, *SOME):
        if met := is_met(m, strategy):
            got = f" (got {met})" if isinstance(met, Named) else ""
            raise ConfigurationError(f"{who} does not support {feature}{got}: {advice}")
    if not m.experts:
        raise ConfigurationError(
            f"{who} needs a Mixture-of-Experts model: add --num-experts, or use --moe-strategy none"
        )
    tokens, divides = m.seq_length // m.context_ranks, strategy.travel.schedule in ("s1", "megatron")
    if m.equal_tokens and divides and tokens % m.tensor_ranks:  # the same tokens, evenly
        raise ConfigurationError(
            f"--seq-length {m.seq_length}: got {tokens} tokens of a sequence, wanted a multiple of "
            f"{m.tensor_ranks}, the number of tensor-parallel ranks; change --seq-length, or use "
            "--moe-strategy parm --moe-strategy-set schedule=s2"
        )
    if (slots := getattr(strategy.settings, "slots", None)) is not None:
        check_slots(m, m.experts // m.devices + slots, m.devices)
    try:  # The nodes of the devices are not known yet.
        strategy.check_sizes(m.experts, Topology.uniform(m.devices, 1))
    except ValueError as error:
        raise ConfigurationError(f"{who}: {error}") from None


def check_slots(m: MegatronSettings, num_slots: int, num_devices: int, others: Collection[int] = ()) -> None:
    """Refuse a device's number of slots with which the back end of Megatron's flex dispatcher would fail.

    ``others`` are the numbers of slots with which other dispatchers of the process were built.
    """
    num_ranks, wanted = num_devices * m.parts, ""
    most = _MOST_IN_NODE if num_ranks <= _NODE_RANKS else _MOST_OF_NODE // _NODE_RANKS
    if m.flex == "deepep" and num_ranks > 1 and num_slots > most:
        wanted = f"at most {most} with DeepEP over {num_ranks} ranks"
    elif m.flex == "ncclep" and set(others) - {num_slots}:
        wanted = f"{max(others)} as in layers before, because NCCL EP has one number of experts in a process"
    if wanted:
        raise ConfigurationError(
            f"slots: got {num_slots} for owned experts and replicas of a device, wanted {wanted}; change the "
            "setting slots, or use another --moe-flex-dispatcher-backend"
        )


def slot_multiple(m: MegatronSettings, num_devices: int) -> int:
    """Return the number of which a device's slots must be a multiple for the flex dispatcher's back end.

    HybridEP sends a token's probabilities for all slots of an NVLink domain in units of 16 bytes, 4 numbers.
    """
    num_ranks = num_devices * m.parts
    domain = int(os.environ.get(_DOMAIN, 0)) or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    return 4 // math.gcd(4, min(domain, num_ranks)) if m.flex == "hybridep" else 1
