"""Settings of Megatron under which a placement strategy would stop, hang or compute wrong results.

They are refused before a run starts. The tables serve Megatron's parsed arguments and its
configs: settings that exist in both have the same name.
"""

import logging
import math
import os
import textwrap
from collections.abc import Collection
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.strategy import Strategy

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)

_NODE_RANKS = 8  # DeepEP's number of ranks in a node, a constant of its kernels.
_MOST_IN_NODE, _MOST_OF_NODE = 128, 512  # Threads of its kernels that count tokens, one for each expert.
_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
_DELAYING = "--delay-wgrad-compute and --overlap-dispatch-backward-with-experts-wgrad"


class Facts(dict[str, Any]):
    """Values of Megatron's settings by name, ``None`` where one does not exist, and what follows from them.

    The settings are parsed arguments, a ``TransformerConfig``, or a tuple of this with the configs of DDP and
    optimizer, whose first value but ``None`` and ``False`` counts. A strategy adds facts about all.
    """

    def __init__(self, settings: Any, strategy: Strategy | None = None) -> None:
        super().__init__()
        self._settings = settings if isinstance(settings, tuple) else (settings,)
        self["devices"] = self["expert_model_parallel_size"] or 1
        self["experts"] = self["num_moe_experts"] or self["num_experts"] or 0
        self["tensor_ranks"] = self["tensor_model_parallel_size"] or 1
        # By default, the tensor-parallel ranks share an expert. GTP divides its weights further.
        self["parts"] = self["expert_tensor_parallel_size"] or self["tensor_ranks"]
        shards = self["expert_tensor_parallel_num_weight_shards"] or self["parts"]
        dense_shards = self["tensor_parallel_num_weight_shards"] or self["tensor_ranks"]
        sizes = self["expert_gtp_weight_remat_size"] or 1, self["gtp_weight_remat_size"] or 1
        self["weight_shards"] = max(*sizes, shards // self["parts"], dense_shards // self["tensor_ranks"])
        self["equal_tokens"] = self["tensor_ranks"] > 1 and not self["sequence_parallel"]
        self["delays"] = self["delay_wgrad_compute"] or self["overlap_dispatch_backward_with_experts_wgrad"]
        self["saves"] = self["save"] is not None or self["non_persistent_save_interval"] is not None
        has_old_flag = self["enable_cuda_graph"] or self["external_cuda_graph"]
        self["graphs"] = (self["cuda_graph_impl"] or "none") != "none" or bool(has_old_flag)
        modules = self["graphs"] and (self["cuda_graph_modules"] or self["cuda_graph_scope_deprecated"])
        if isinstance(modules, str) or hasattr(modules, "name"):
            modules = (modules,)
        names = {str(getattr(module, "name", module)) for module in modules or ()}
        self["captured"] = names - {"full"}  # empty without graphs, or for whole layers
        # The graph then contains the remap to slots in its one form, and the number of slots.
        self["captures_preprocess"] = "moe_preprocess" in names
        self["flex"] = None  # its back end
        if self["moe_token_dispatcher_type"] == "flex":
            chosen = self["moe_flex_dispatcher_backend"] or "deepep"
            self["flex"] = "deepep" if self["moe_enable_deepep"] else chosen
        self["needs_fixed_slots"] = self["captures_preprocess"] or self["flex"] == "ncclep"
        if strategy is None:
            return
        own: Any = strategy.settings
        self |= {"strategy": strategy, "travel": strategy.travel}
        self["gate"] = getattr(own, "router", "stock") == "topology_aware"
        self["moves"] = strategy.moves_owners
        self["divides"] = strategy.travel.schedule in ("s1", "megatron")  # the same tokens, evenly
        # auto selects a schedule of Parm only if it can.
        self["asks_schedule"] = strategy.travel.schedule != "megatron" and not strategy.selects
        self["keeps_flex"] = self["flex"] is not None and not self["asks_schedule"]
        one_of = (strategy, *getattr(strategy, "candidates", {}).values())
        self["plans_micro_batches"] = any(one.replica_life is ReplicaLife.MICRO_BATCH for one in one_of)
        # Re-sharding of fssdp moves owners to other numbers for each device.
        has_slots = hasattr(own, "slots") and own.slots is not None
        reshards = hasattr(own, "slots") and getattr(own, "reshard_interval", None)
        is_fixed = has_slots or not strategy.may_replicate(1)
        self["fixed_slots"] = is_fixed and not strategy.selects and not reshards

    def __missing__(self, name: str) -> Any:
        # Names of environment variables are in capitals.
        values = (getattr(one, name, None) for one in self._settings)
        found = next((value for value in values if value is not None and value is not False), None)
        return os.environ.get(name) if found is None and name.isupper() else found


class Limit(NamedTuple):
    """Something that is refused: its name, the condition on :class:`Facts`, and the user's next step."""

    what: str
    condition: CodeType
    advice: str  # or the effect


def _limits(text: str) -> tuple[Limit, ...]:
    """Limits from rows ``what | condition | advice``, which go on in lines with more indentation."""
    rows = textwrap.dedent(text).strip().replace("\n ", " ").splitlines()
    cells = ([" ".join(cell.split()) for cell in row.split("|")] for row in rows)
    return tuple(Limit(what, compile(condition, what, "eval"), advice) for what, condition, advice in cells)


# Megatron refuses biases of divided experts too, by an assertion. Under sequence parallelism, Megatron 0.19
# sums the gradients of output biases over the tensor-parallel ranks. With whole experts, these ranks own
# different experts, so the result would depend on who owns what.
# The histories of delayed scaling belong to the position of an expert in the module, which has other experts
# from iteration to iteration. Local graphs contain the end of a layer, where the next transfers start.
EVERY = _limits(
    """
    biases of experts under expert tensor parallelism
      | parts > 1 and add_bias_linear | add --disable-bias-linear, or --expert-tensor-parallel-size 1
    biases of experts under sequence parallelism
      | sequence_parallel and tensor_ranks > 1 and add_bias_linear | add --disable-bias-linear
    parameters in fp8 or fp4
      | fp8_param or fp8_param_gather or fp4_param or fp4_param_gather or reuse_grad_buf_for_mxfp8_param_ag
      | weights travel to replicas in bf16, fp16 or fp32, and Transformer Engine quantizes them there:
        remove --fp8-param-gather and --fp4-param-gather
    delayed or custom scaling in fp8 or fp4, and quantization of single modules
      | fp8 and fp8_recipe not in ("tensorwise", "blockwise", "mxfp8") or fp4 and fp4_recipe == "custom"
        or te_precision_config_file or quant_recipe or use_kitchen or kitchen_config_file
      | scales come from earlier iterations, and a device computes other experts in each of them: use
        --fp8-recipe tensorwise, blockwise or mxfp8, and remove --te-precision-config-file and kitchen
    fp8 or fp4 without grouped experts
      | (fp8 or fp4) and not moe_grouped_gemm | add --moe-grouped-gemm
    CUDA graphs of an iteration, a layer or an MoE layer, and --cuda-graph-impl local
      | cuda_graph_impl not in (None, "none", "transformer_engine") or enable_cuda_graph
        or graphs and (not captured or "moe" in captured)
      | transfers and experts change between iterations: use --cuda-graph-impl transformer_engine with
        --cuda-graph-modules attn, mlp, mamba, moe_router or moe_preprocess, or --cuda-graph-impl none
    CUDA graphs of the router (--cuda-graph-modules moe_router) under tensor parallelism without sequence
      parallelism
      | "moe_router" in captured and equal_tokens
      | there the strategy divides the tokens around the router: add --sequence-parallel, or remove moe_router
    one weight tensor for all experts
      | moe_single_grouped_weight or moe_single_grouped_bias
      | each expert has its own owner: remove --moe-single-grouped-weight and --moe-single-grouped-bias
    layers that compute a micro-batch in chunks
      | (mlp_chunks_for_training or 1) > 1 | remove --mlp-chunks-for-training
    grouped tensors of Transformer Engine, hyper-connections (mHC), mxfp8 or zero copies in NCCL EP,
      torch.autocast, and offloading of whole layers
      | moe_use_grouped_tensor and not use_transformer_engine_op_fuser or enable_mhc_connections
        or "mxfp8" in (moe_dispatch_fwd_dtype, moe_combine_bwd_dtype) or moe_ncclep_zero_copy
        or enable_autocast or cpu_offloading or (cpu_offloading_num_layers or 0) > 0
      | never run with experts in slots: remove --moe-use-grouped-tensor, --enable-mhc-connections,
        --moe-dispatch-fwd-dtype, --moe-combine-bwd-dtype, --moe-ncclep-zero-copy, enable_autocast and
        --cpu-offloading-num-layers
    a dispatcher or back end that is not known
      | moe_token_dispatcher_type not in (None, "allgather", "alltoall", "flex")
        or flex not in (None, "deepep", "hybridep", "ncclep")
      | it may limit the number of slots: use --moe-token-dispatcher-type alltoall
    fully sharded data parallelism of the whole model
      | use_megatron_fsdp or use_custom_fsdp or use_torch_fsdp2 or init_model_with_meta_device
      | use Megatron's DDP: remove --use-megatron-fsdp, --use-torch-fsdp2 and --init-model-with-meta-device
    weight rematerialization over GTP
      | weight_shards > 1
      | remove --expert-tensor-parallel-num-weight-shards and --tensor-parallel-num-weight-shards
    grouped products of CUTLASS (NVTE_USE_CUTLASS_GROUPED_GEMM) with --grad-reduce-in-bf16
      | NVTE_USE_CUTLASS_GROUPED_GEMM == "1" and grad_reduce_in_bf16
      | they take one data type for the gradients of all experts, and those of replicas are in fp32: unset the
        variable, or remove --grad-reduce-in-bf16
    paged stashing | moe_paged_stash | remove --moe-paged-stash
    a --transformer-impl for inference
      | transformer_impl not in (None, "local", "transformer_engine")
      | use --transformer-impl local or transformer_engine
    saved activations, data gradients and tokens of experts
      | save_activations_interval or save_dgrads_interval or save_tokens_per_expert_interval
      | the files would have rows of slots under names of experts: remove --save-activations-interval,
        --save-dgrads-interval and --save-tokens-per-expert-interval
    upcycling, RL, frozen models, restarts in a process, fake groups, and context parallelism in varying sizes
      | moe_use_upcycling or perform_rl_step or freeze_all_layers or inprocess_restart or fake_process_group
        or hybrid_context_parallel
      | plans are for ranks and micro-batches of one training: remove --moe-use-upcycling, --perform-rl-step,
        --freeze-all-layers, --inprocess-restart, --fake-process-group and --hybrid-context-parallel
    """
)
"""What every strategy but ``none`` refuses."""

# Transformer Engine calls DDP's hooks of the module in which a Parameter is registered. After a re-shard, the
# Parameter may hold an expert of another layer, whose gradients come later.
SOME = _limits(
    f"""
    --moe-token-dispatcher-type flex without sequence parallelism
      | flex and equal_tokens
      | there the strategy divides the tokens and sends them itself: add --sequence-parallel
    smart_schedule or exchange without sequence parallelism
      | (travel.smart_schedule or travel.exchange != "megatron") and equal_tokens
      | there tokens are divided by a schedule of Parm, and each has steps of its own to send them: add
        --sequence-parallel, or remove smart_schedule and exchange
    --moe-token-dispatcher-type flex with a schedule, steps or an exchange of the plugin
      | flex and (travel.smart_schedule is True or travel.exchange == "deduplicated"
        or tensor_ranks > 1 and asks_schedule)
      | two dispatchers exclude each other: use --moe-token-dispatcher-type alltoall, or remove schedule,
        smart_schedule and exchange
    delayed weight gradients with smart_schedule
      | delays and travel.smart_schedule
      | its steps run the experts several times in a pass, and Megatron delays the gradients of one run:
        remove {_DELAYING}, or smart_schedule
    delayed weight gradients with replicas of single micro-batches (fastermoe, quota)
      | delays and plans_micro_batches
      | the slots have other experts when the gradients are computed: remove {_DELAYING}
    delayed weight gradients with re-sharding
      | delays and moves
      | DDP would reduce gradients of moved experts before they are computed: set reshard_interval=0, or
        remove {_DELAYING}
    --moe-router-padding-for-quantization with schedule=s2
      | (moe_router_padding_for_quantization or moe_router_padding_for_fp8)
        and travel.schedule == "s2" and equal_tokens
      | a tensor-parallel rank's share of the padded rows is no multiple: use another schedule
    --cuda-graph-modules moe_preprocess with a schedule, steps or an exchange of the plugin
      | captures_preprocess and (travel.smart_schedule or travel.exchange != "megatron"
        or tensor_ranks > 1 and travel.schedule != "megatron")
      | they are decided before the graph or wait in it: remove moe_preprocess
    --cuda-graph-modules moe_preprocess with an expert capacity
      | captures_preprocess and moe_expert_capacity_factor is not None
      | numbers of rows vary with slots, also of padded experts: remove moe_preprocess
    --cuda-graph-modules moe_preprocess with plans after the gate (fastermoe, quota, planner=hecate)
      | captures_preprocess and (plans_micro_batches or strategy.asks_after_gate(1))
      | the graph would have the slots before the plan is made: remove moe_preprocess, or use another strategy
    --cuda-graph-modules moe_preprocess without fixed slots
      | captures_preprocess and (moves or not fixed_slots)
      | the graph contains their number: set slots and reshard_interval=0, or remove moe_preprocess
    --moe-flex-dispatcher-backend ncclep without fixed slots
      | flex == "ncclep" and not fixed_slots
      | NCCL EP has one number of experts in a process: set slots, or use another back end
    --moe-latent-size under tensor parallelism without sequence parallelism
      | equal_tokens and moe_latent_size
      | there its projections get only a part of the tokens: add --sequence-parallel
    router=topology_aware with another selection, a fused kernel or a graph of the router
      | gate and (moe_router_fusion or moe_enable_routing_replay or moe_router_group_topk
        or "moe_router" in captured or moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"))
      | remove --moe-router-fusion, --moe-enable-routing-replay, --moe-router-group-topk, sinkhorn,
        quantile_balancing and moe_router of --cuda-graph-modules, or use router=stock
    smart_schedule with expert tensor parallelism
      | travel.smart_schedule and parts > 1 and devices > 1
      | it needs whole experts: use smart_schedule=false or --expert-tensor-parallel-size 1
    --use-precision-aware-optimizer and --optimizer-cuda-graph with re-sharding or resident replicas (flexmoe)
      | (moves or strategy.resident_slots) and (use_precision_aware_optimizer or optimizer_cuda_graph)
      | states move in fp32, and these store them in other forms or places: remove them, or {KEEP_OWNERS}
    MuP with resident replicas (flexmoe)
      | strategy.resident_slots and use_mup | replicas would miss its learning rates: remove --use-mup
    fp16 with resident replicas (flexmoe)
      | strategy.resident_slots and fp16
      | its loss scale may skip an optimizer step, and replicas have their own: use --bf16 or fp32
    a --ckpt-format other than torch_dist with re-sharding
      | moves and saves and ckpt_format != "torch_dist"
      | only torch_dist stores an expert under its layer and number: use --ckpt-format torch_dist, or
        {KEEP_OWNERS}
    --ckpt-convert-format with re-sharding
      | moves and ckpt_convert_format not in (None, "torch_dist")
      | convert without a placement strategy (--moe-strategy none), or {KEEP_OWNERS}
    --non-persistent-ckpt-type local with re-sharding
      | moves and saves and non_persistent_ckpt_type == "local"
      | it stores experts by rank and slot: use --non-persistent-ckpt-type global, or {KEEP_OWNERS}
    --save-params-interval and --save-wgrads-interval with re-sharding
      | moves and (save_params_interval is not None or save_wgrads_interval is not None)
      | they save tensors by the names of Parameters, which hold other experts after a re-shard: remove them,
        or {KEEP_OWNERS}
    """
)
"""What some strategies and settings refuse."""


WARNED = _limits(
    """
    --moe-router-group-topk above --moe-router-topk
      | moe_router_topk and (moe_router_group_topk or 0) > moe_router_topk
      | Megatron selects groups of experts without looking at scores; lower it
    --moe-token-drop-policy position
      | moe_token_drop_policy == "position" and moe_expert_capacity_factor
      | Megatron keeps tokens from the middle of a micro-batch, or from anywhere; use probs
    """
)
"""What Megatron does in another way than it says, and the effect."""


def is_met(condition: CodeType, facts: Facts) -> bool:
    """Whether a limit's condition is true."""
    return bool(eval(condition, {}, facts))


def check_limits(name: str, strategy: Strategy, settings: Any) -> None:
    """Refuse, by a ConfigurationError, settings of a model that the strategy of this name cannot serve.

    The settings are those of :class:`Facts`. Rank 0 warns of :data:`WARNED`, once.
    """
    facts, who = Facts(settings, strategy), f"--moe-strategy {name}"
    for what, condition, advice in (*EVERY, *SOME):
        if is_met(condition, facts):
            raise ConfigurationError(f"{who} does not support {what}: {advice}")
    for what, condition, effect in WARNED:
        if is_met(condition, facts) and os.environ.get("RANK", "0") == "0":
            _warn_once(f"[fssdp] {what}: {effect}")
    experts, devices, top_k = facts["experts"], facts["devices"], facts["moe_router_topk"] or 0
    if not experts:
        raise ConfigurationError(
            f"{who} needs a Mixture-of-Experts model: add --num-experts, or use --moe-strategy none"
        )
    if top_k > experts:  # Megatron itself finds it in the first iteration, by an error of torch.topk.
        raise ConfigurationError(
            f"--moe-router-topk: got {top_k}, wanted at most the {experts} experts; change it or "
            "--num-experts"
        )
    if experts % devices:
        raise ConfigurationError(
            f"--expert-model-parallel-size: got {devices}, wanted a divisor of the {experts} experts; "
            "change it or --num-experts"
        )
    seq_length, sharers = facts["seq_length"] or 0, facts["tensor_ranks"]
    tokens = seq_length // (facts["context_parallel_size"] or 1)
    if facts["equal_tokens"] and facts["divides"] and tokens % sharers:
        raise ConfigurationError(
            f"--seq-length {seq_length}: got {tokens} tokens of a sequence, wanted a multiple of {sharers}, "
            "the number of tensor-parallel ranks; change --seq-length, or use --moe-strategy parm "
            "--moe-strategy-set schedule=s2"
        )
    if (slots := getattr(strategy.settings, "slots", None)) is not None:
        check_slots(settings, experts // devices + slots, devices)
    try:  # The nodes of the devices are not known yet.
        strategy.check_sizes(experts, Topology.uniform(devices, 1))
    except ValueError as error:
        raise ConfigurationError(f"{who}: {error}") from None


def check_slots(config: Any, num_slots: int, num_devices: int, others: Collection[int] = ()) -> None:
    """Refuse a device's number of slots with which the back end of Megatron's flex dispatcher would fail.

    ``others`` are the numbers of slots with which other dispatchers of the process were built.
    """
    facts, wanted = Facts(config), ""
    num_ranks = num_devices * facts["parts"]
    most = _MOST_IN_NODE if num_ranks <= _NODE_RANKS else _MOST_OF_NODE // _NODE_RANKS
    if facts["flex"] == "deepep" and num_ranks > 1 and num_slots > most:
        wanted = f"at most {most} with DeepEP over {num_ranks} ranks"
    elif facts["flex"] == "ncclep" and set(others) - {num_slots}:
        wanted = f"{max(others)} as in layers before, because NCCL EP has one number of experts in a process"
    if wanted:
        raise ConfigurationError(
            f"slots: got {num_slots} for owned experts and replicas of a device, wanted {wanted}; change the "
            "setting slots, or use another --moe-flex-dispatcher-backend"
        )


def slot_multiple(config: Any, num_devices: int) -> int:
    """Return the number of which a device's slots must be a multiple for the flex dispatcher's back end.

    HybridEP sends a token's probabilities for all slots of an NVLink domain in units of 16 bytes, 4 numbers.
    """
    facts = Facts(config)
    num_ranks = num_devices * facts["parts"]
    domain = int(os.environ.get(_DOMAIN, 0)) or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    return 4 // math.gcd(4, min(domain, num_ranks)) if facts["flex"] == "hybridep" else 1
