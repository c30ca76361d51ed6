"""Tells at the start what a rank's experts are going to take."""

import logging
from typing import Any

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_fssdp.megatron_adapter.strategy_session import StrategySession
from megatron_fssdp.planning.memory_accounting import ExpertMemory, ExpertOptimizer, expert_memory
from megatron_fssdp.runtime.layer_executor import CHUNK_BYTES
from megatron_fssdp.strategies.strategy import ResidentStrategy

logger = logging.getLogger(__name__)


def report_memory(session: StrategySession, args: Any, num_micro_batches: int | None = None) -> None:
    """One log line per pipeline stage; all its ranks have the same slots.

    Args:
        session: The strategy and its layers.
        args: Megatron's arguments.
        num_micro_batches: Of an iteration; by default of the next one.
    """
    if (
        parallel_state.get_expert_model_parallel_rank() == 0
        and parallel_state.get_expert_data_parallel_rank() == 0
        and parallel_state.get_expert_tensor_parallel_rank() == 0
    ):
        memory = account_memory(session, args, num_micro_batches or get_num_microbatches())
        logger.warning(f"[fssdp] memory of a rank: {memory.describe()}")


def account_memory(session: StrategySession, args: Any, num_micro_batches: int) -> ExpertMemory:
    """Bytes of this rank's experts under the strategy's present limits.

    Args:
        session: The strategy and its layers, at least one.
        args: Megatron's arguments.
        num_micro_batches: Of an iteration.
    """
    layers = session.runtime.layers
    first = layers[0]
    layout, context = first.layout_of_all(), first.context
    per_layer = context.num_experts // context.num_devices
    # A layer may own nothing here; a session has Parameters.
    parameter = next(ps[0] for layer in layers for ps in layer.parameters.values())
    main_grad = getattr(parameter, "main_grad", None)
    # Without replicas of its own making a strategy has no such limit.
    replicas = min(session.strategy.slots(context), context.num_experts - per_layer)
    return expert_memory(
        num_layers=len(layers),
        slots_per_device=len(layers) * per_layer,
        replicas_per_layer=replicas,
        owned_per_layer=per_layer,
        expert_elements=layout.numel,
        dtype_bytes=layout.dtype.itemsize,
        gradient_bytes=layout.dtype.itemsize if main_grad is None else main_grad.element_size(),
        optimizer=expert_optimizer(args),
        expert_data_parallel_size=parallel_state.get_expert_data_parallel_world_size(),
        rematerialize=session.rematerializes,
        resident=isinstance(session.strategy, ResidentStrategy),
        num_micro_batches=num_micro_batches,
        chunk_bytes=CHUNK_BYTES,
    )


def expert_optimizer(args: Any) -> ExpertOptimizer:
    """What Megatron's optimizer keeps of every expert."""
    return ExpertOptimizer(
        num_state_tensors=_num_state_tensors(args),
        has_master_weights=args.fp16 or args.bf16,
        is_distributed=bool(args.use_distributed_optimizer),
    )


def _num_state_tensors(args: Any) -> int:
    """States of a parameter's size: momentum where there is any, both moments of Adam."""
    if args.optimizer == "sgd":
        return int(args.sgd_momentum != 0)
    return {"lion": 1}.get(args.optimizer, 2)
