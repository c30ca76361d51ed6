"""Tells at the start what a rank's experts are going to take."""

import logging
from collections.abc import Sequence
from typing import Any

from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.utils import get_model_config

from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.planning.memory.held_replicas import HeldReplicas
from megatron_fssdp.planning.memory.memory_accounting import ExpertMemory, ExpertOptimizer, expert_memory
from megatron_fssdp.planning.memory.pipeline_stage import PipelineStage
from megatron_fssdp.runtime.execution.layer_executor import CHUNK_BYTES

logger = logging.getLogger(__name__)


def report_memory(session: StrategySession, args: Any, held: HeldReplicas) -> None:
    """One log line per pipeline stage; all its ranks have the same slots.

    Args:
        session: The strategy and its layers.
        args: Megatron's arguments.
        held: When replicas are there.
    """
    if (
        parallel_state.get_expert_model_parallel_rank() == 0
        and parallel_state.get_expert_data_parallel_rank() == 0
        and parallel_state.get_expert_tensor_parallel_rank() == 0
    ):
        logger.warning(f"[fssdp] memory of a rank: {account_memory(session, args, held).describe()}")


def account_memory(session: StrategySession, args: Any, held: HeldReplicas) -> ExpertMemory:
    """Bytes of this rank's experts under the strategy's present limits.

    Args:
        session: The strategy and its layers, at least one.
        args: Megatron's arguments.
        held: When replicas are there.
    """
    layers = session.runtime.layers
    first = layers[0]
    layout, context = first.experts.layout(), first.context
    per_layer = context.num_experts // context.num_devices
    # A layer may own nothing here; a session has Parameters.
    parameter = next(ps[0] for layer in layers for ps in layer.experts.parameters.values())
    main_grad = getattr(parameter, "main_grad", None)
    # Without replicas of its own making a strategy has no such limit.
    replicas = min(session.strategy.slots(context), context.num_experts - per_layer)
    return expert_memory(
        held=held,
        slots_per_device=len(layers) * per_layer,
        replicas_per_layer=replicas,
        owned_per_layer=per_layer,
        expert_elements=layout.numel,
        dtype_bytes=layout.dtype.itemsize,
        gradient_bytes=layout.dtype.itemsize if main_grad is None else main_grad.element_size(),
        optimizer=expert_optimizer(args),
        expert_data_parallel_size=parallel_state.get_expert_data_parallel_world_size(),
        chunk_bytes=CHUNK_BYTES,
    )


def held_replicas(session: StrategySession, model: Sequence[Any], args: Any) -> HeldReplicas:
    """When the strategy's replicas are on this rank, in all iterations to come.

    Args:
        session: The strategy.
        model: DDP's chunks of the model on this rank.
        args: Megatron's arguments.
    """
    stage = PipelineStage(
        tuple(sum(isinstance(module, StrategyMoELayer) for module in chunk.modules()) for chunk in model),
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        group_size=get_model_config(model[0]).microbatch_group_size_per_vp_stage,
    )
    return HeldReplicas(session.strategy.replica_life, stage, _most_micro_batches(args))


def _most_micro_batches(args: Any) -> int:
    """Of any iteration: where batches grow (``--step-batch-size-schedule``), of the largest one to come."""
    now = int(num_microbatches_calculator.get_num_microbatches())
    schedule = getattr(args, "step_batch_size_schedule", None)
    if schedule is None:
        return now
    parsed = num_microbatches_calculator.StepBatchsizeNumMicroBatchesCalculator._parse_schedule(
        schedule, None
    )
    largest = max(batch_size for _, batch_size in parsed)
    return max(now, largest // (args.micro_batch_size * args.data_parallel_size))


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
