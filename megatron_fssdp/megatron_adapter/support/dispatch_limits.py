"""Settings of Megatron that do not fit some strategies, or the slots that experts are in."""

import math
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.support.supported_features import (
    Value,
    asks_any,
    captured_modules,
    expert_parts,
    refuse,
    tensor_parallel,
    value_of,
)
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.strategy import Strategy

_NODE_RANKS = 8  # DeepEP's number of ranks in a node, a constant of its kernels.
_MOST_IN_NODE, _MOST_OF_NODE = 128, 512  # Threads of its kernels that count tokens, one for each expert.
_DIVIDING = ("s1", "megatron")  # Schedules under which tensor-parallel ranks divide the same tokens evenly.
_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"

Rule = tuple[str, Callable[[Strategy, Value], bool], str]
"""Name of the refused combination; whether strategy and settings have it; the next step for the user."""

_delays = asks_any("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad")
_pads = asks_any("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
_DELAYING = "--delay-wgrad-compute and --overlap-dispatch-backward-with-experts-wgrad"

RULES: tuple[Rule, ...] = (
    (
        "--moe-token-dispatcher-type flex without sequence parallelism",
        lambda strategy, value: _back_end(value) is not None and _has_equal_tokens(value),
        "there the strategy divides the tokens and sends them itself: add --sequence-parallel",
    ),
    (
        "smart_schedule or exchange without sequence parallelism",
        lambda strategy, value: (
            (bool(strategy.travel.smart_schedule) or strategy.travel.exchange != "megatron")
            and _has_equal_tokens(value)
        ),
        "there tokens are divided by a schedule of Parm, and each has steps of its own to send them: add "
        "--sequence-parallel, or remove smart_schedule and exchange",
    ),
    (
        "--moe-token-dispatcher-type flex with a schedule, steps or an exchange of the plugin",
        lambda strategy, value: (
            _back_end(value) is not None
            and (
                strategy.travel.smart_schedule is True
                or strategy.travel.exchange == "deduplicated"
                or (tensor_parallel(value) > 1 and _asks_for_schedule(strategy))
            )
        ),
        "two dispatchers exclude each other: use --moe-token-dispatcher-type alltoall, or remove schedule, "
        "smart_schedule and exchange",
    ),
    (
        "delayed weight gradients with smart_schedule",
        lambda strategy, value: _delays(value) and bool(strategy.travel.smart_schedule),
        "its steps run the experts several times in a pass, and Megatron delays the gradients of one run: "
        f"remove {_DELAYING}, or smart_schedule",
    ),
    (
        "delayed weight gradients with replicas of single micro-batches (fastermoe, quota)",
        lambda strategy, value: _delays(value) and _plans_micro_batches(strategy),
        f"the slots have other experts when the gradients are computed: remove {_DELAYING}",
    ),
    (
        "delayed weight gradients with re-sharding",
        # Transformer Engine calls DDP's hooks of the module in which a Parameter is registered. After a
        # re-shard, the Parameter may hold an expert of another layer, whose gradients come later.
        lambda strategy, value: _delays(value) and strategy.moves_owners,
        "DDP would reduce gradients of moved experts before they are computed: set reshard_interval=0, or "
        f"remove {_DELAYING}",
    ),
    (
        "--moe-router-padding-for-quantization with schedule=s2",
        lambda strategy, value: (
            _pads(value) and strategy.travel.schedule == "s2" and _has_equal_tokens(value)
        ),
        "a tensor-parallel rank's share of the padded rows is no multiple: use another schedule",
    ),
    (
        "--cuda-graph-modules moe_preprocess with a schedule, steps or an exchange of the plugin",
        lambda strategy, value: (
            _captures_preprocess(value)
            and (
                bool(strategy.travel.smart_schedule)
                or strategy.travel.exchange != "megatron"
                or (tensor_parallel(value) > 1 and strategy.travel.schedule != "megatron")
            )
        ),
        "they are decided before the graph or wait in it: remove moe_preprocess",
    ),
    (
        "--cuda-graph-modules moe_preprocess with an expert capacity",
        lambda _, value: _captures_preprocess(value) and value("moe_expert_capacity_factor") is not None,
        "numbers of rows vary with slots, also of padded experts: remove moe_preprocess",
    ),
    (
        "--cuda-graph-modules moe_preprocess with plans after the gate (fastermoe, quota, planner=hecate)",
        lambda strategy, value: (
            _captures_preprocess(value) and (_plans_micro_batches(strategy) or strategy.asks_after_gate(1))
        ),
        "the graph would have the slots before the plan is made: remove moe_preprocess, or use another "
        "strategy",
    ),
    (
        "--cuda-graph-modules moe_preprocess without fixed slots",
        lambda strategy, value: (
            _captures_preprocess(value) and (strategy.moves_owners or not _has_fixed_slots(strategy))
        ),
        "the graph contains their number: set slots and reshard_interval=0, or remove moe_preprocess",
    ),
    (
        "--moe-flex-dispatcher-backend ncclep without fixed slots",
        lambda strategy, value: _back_end(value) == "ncclep" and not _has_fixed_slots(strategy),
        "NCCL EP has one number of experts in a process: set slots, or use another back end",
    ),
    (
        "--moe-latent-size under tensor parallelism without sequence parallelism",
        lambda _, value: _has_equal_tokens(value) and bool(value("moe_latent_size")),
        "there its projections get only a part of the tokens: add --sequence-parallel",
    ),
    (
        "router=topology_aware with schedule=s2, baseline or auto without sequence parallelism",
        lambda strategy, value: (
            _has_equal_tokens(value)
            and strategy.settings.uses_gate
            and strategy.travel.schedule not in _DIVIDING
        ),
        "tensor-parallel ranks have to select the same experts, and this gate selects by the node: use "
        "schedule=s1 or --sequence-parallel",
    ),
    (
        "smart_schedule with expert tensor parallelism",
        lambda strategy, value: (
            bool(strategy.travel.smart_schedule)
            and expert_parts(value) > 1
            and (value("expert_model_parallel_size") or 1) > 1
        ),
        "it needs whole experts: use smart_schedule=false or --expert-tensor-parallel-size 1",
    ),
    (
        "fp16 with resident replicas (flexmoe)",
        lambda strategy, value: bool(strategy.resident_slots and value("fp16")),
        "its loss scale may skip an optimizer step, and replicas have their own: use --bf16 or fp32",
    ),
)


def check_dispatch(name: str, strategy: Strategy, settings: Any) -> None:
    """Refuse, by a ConfigurationError, settings that do not fit the strategy or the slots that it has."""
    refusals = [(what, partial(is_refused, strategy), advice) for what, is_refused, advice in RULES]
    refuse(f"--moe-strategy {name}", refusals, settings)
    value = value_of(settings)
    n_mp, seq_length = tensor_parallel(value), value("seq_length") or 0
    tokens = seq_length // (value("context_parallel_size") or 1)
    if _has_equal_tokens(value) and strategy.travel.schedule in _DIVIDING and tokens % n_mp:
        raise ConfigurationError(
            f"--seq-length {seq_length}: got {tokens} tokens of a sequence, wanted a multiple of {n_mp}, "
            "the number of tensor-parallel ranks; change --seq-length, or use --moe-strategy parm "
            "--moe-strategy-set schedule=s2"
        )
    num_devices = value("expert_model_parallel_size") or 1
    num_experts = value("num_moe_experts") or value("num_experts")
    if (slots := getattr(strategy.settings, "slots", None)) is not None:
        check_slots(settings, num_experts // num_devices + slots, num_devices)


def check_slots(config: Any, num_slots: int, num_devices: int, others: Collection[int] = ()) -> None:
    """Refuse a device's number of slots with which the back end of Megatron's flex dispatcher would fail.

    ``others`` are the numbers of slots with which other dispatchers of the process were built.

    Raises:
        ConfigurationError: The back end cannot have so many slots.
    """
    value = value_of(config)
    back_end, num_ranks, wanted = _back_end(value), num_devices * expert_parts(value), ""
    if back_end == "deepep" and num_ranks > 1:
        most = _MOST_IN_NODE if num_ranks <= _NODE_RANKS else _MOST_OF_NODE // _NODE_RANKS
        if num_slots > most:
            wanted = f"at most {most} with DeepEP over {num_ranks} ranks"
    elif back_end == "ncclep" and set(others) - {num_slots}:
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
    value = value_of(config)
    if _back_end(value) != "hybridep":
        return 1
    num_ranks = num_devices * expert_parts(value)
    domain = int(os.environ.get(_DOMAIN, 0)) or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    return 4 // math.gcd(4, min(domain, num_ranks))


def keeps_flex(strategy: Strategy, settings: Any) -> bool:
    """Whether Megatron's flex dispatcher stays where ``auto`` would select one of Parm's schedules."""
    return _back_end(value_of(settings)) is not None and not _asks_for_schedule(strategy)


def shares_evenly(settings: Any) -> bool:
    """Whether experts' tokens are shared out evenly: a CUDA graph contains the remap, in its one form."""
    return _captures_preprocess(value_of(settings))


def needs_fixed_slots(settings: Any) -> bool:
    """Whether all slots must exist from the start: a CUDA graph or NCCL EP has their number."""
    value = value_of(settings)
    return _captures_preprocess(value) or _back_end(value) == "ncclep"


def _back_end(value: Value) -> str | None:
    """The back end of the flex dispatcher; ``None`` with another dispatcher."""
    if value("moe_token_dispatcher_type") != "flex":
        return None
    return "deepep" if value("moe_enable_deepep") else value("moe_flex_dispatcher_backend") or "deepep"


def _has_equal_tokens(value: Value) -> bool:
    """Whether tensor-parallel ranks have the same tokens."""
    return tensor_parallel(value) > 1 and not value("sequence_parallel")


def _asks_for_schedule(strategy: Strategy) -> bool:
    """Whether the user has chosen one of Parm's schedules; ``auto`` selects them only if it can."""
    return strategy.travel.schedule != "megatron" and not strategy.selects


def _captures_preprocess(value: Value) -> bool:
    return "moe_preprocess" in captured_modules(value)


def _plans_micro_batches(strategy: Strategy) -> bool:
    candidates = getattr(strategy, "candidates", {})
    return any(one.replica_life is ReplicaLife.MICRO_BATCH for one in (strategy, *candidates.values()))


def _has_fixed_slots(strategy: Strategy) -> bool:
    """Whether every layer always has the same number of slots."""
    settings: Any = strategy.settings
    if strategy.selects or (getattr(settings, "reshard_interval", None) and hasattr(settings, "slots")):
        return False  # Re-sharding of fssdp moves owners to other numbers for each device.
    return getattr(settings, "slots", None) is not None or not strategy.may_replicate(1)
