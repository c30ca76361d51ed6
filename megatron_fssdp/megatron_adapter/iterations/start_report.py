"""Says at the start of a training in which layers a strategy is, and what memory experts will take."""

import logging
from collections.abc import Sequence
from typing import Any

from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.utils import get_model_config, log_single_rank

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.all_ranks import of_all_ranks
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostModel, HostSettings
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.planning.compiled_form import kernel_form
from megatron_fssdp.planning.memory import ExpertMemory, ExpertOptimizer, expert_memory
from megatron_fssdp.planning.replica_life import HeldReplicas, PipelineStage
from megatron_fssdp.planning.transfer.message_size import message_rule

logger = logging.getLogger(__name__)


def report_installation(model: HostModel) -> None:
    """Log one line about the layers of a model that have joined, on global rank 0. Collective."""
    session = model.session
    assert session is not None
    layers = session.runtime.layers
    if not sum(of_all_ranks(len(layers))):
        raise ConfigurationError(
            f"--moe-strategy {model.name}: got a model with experts and no MoE layer on any rank, wanted "
            "Megatron's MoE layers; build the model from Megatron's MoE specs, or use --moe-strategy none"
        )
    place, limits = "the MoE layers of other pipeline stages; this stage has no MoE layer", ""
    if layers:
        context = layers[0].context
        numbers = ", ".join(str(layer.context.layer) for layer in layers)
        place = (
            f"{len(layers)} MoE layers of this pipeline stage (layers {numbers}), {context.num_experts} "
            f"experts on {context.num_devices} devices in {context.topology.num_nodes} node(s)"
        )
        measured = session.strategy.profile_iterations
        limits = f"{session.strategy.limits(context)}; "
        if measured:
            limits = f"costs are measured in the first {measured} iterations; "
        if model.name == "parm" and model.host.tensor_model_parallel_size == 1:
            limits = f"without tensor parallelism, {model.name} is the same as ep; "
    settings = model.settings.model_dump(exclude_defaults=True, mode="json")
    shown = " ".join(f"{key}={value}" for key, value in settings.items()) or "all by default"
    if session.keeps_owners:
        limits += f"owners do not move, because {session.keeps_owners}; "
    log_single_rank(
        logger,
        logging.INFO,
        f"[fssdp] strategy {model.name}: installed in {place}; settings: {shown}; {limits}"
        f"planning kernels: {kernel_form()}",
    )


def reports_for_stage() -> bool:
    """Whether this rank logs for its pipeline stage."""
    return not (
        parallel_state.get_expert_model_parallel_rank()
        or parallel_state.get_expert_data_parallel_rank()
        or parallel_state.get_expert_tensor_parallel_rank()
    )


def report_memory(session: StrategySession, host: HostSettings, held: HeldReplicas) -> None:
    """Log one line for each pipeline stage. All ranks of a stage have the same number of slots."""
    if reports_for_stage():
        logger.info(f"[fssdp] memory of a rank: {account_memory(session, host, held).describe()}")


def account_memory(session: StrategySession, host: HostSettings, held: HeldReplicas) -> ExpertMemory:
    """Return the bytes of this rank's experts under the strategy's limits; there must be a layer."""
    layers = session.runtime.layers
    first = layers[0]
    layout, context = first.experts.layout(), first.context
    per_layer = context.num_experts // context.num_devices
    # After a re-shard, this rank may own no expert of a layer, but it owns experts of some layer.
    parameter = next(ps[0] for layer in layers for ps in layer.experts.parameters.values())
    main_grad = getattr(parameter, "main_grad", None)
    return expert_memory(
        held=held,
        slots_per_device=len(layers) * per_layer,
        # Some strategies set no limit. A device then has at most the experts that it does not own.
        replicas={
            life: min(slots, context.num_experts - per_layer)
            for life, slots in session.strategy.slots_by_life(context).items()
        },
        owned_per_layer=per_layer,
        expert_elements=layout.numel,
        dtype_bytes=layout.dtype.itemsize,
        gradient_bytes=layout.dtype.itemsize if main_grad is None else main_grad.element_size(),
        optimizer=expert_optimizer(host),
        expert_data_parallel_size=parallel_state.get_expert_data_parallel_world_size(),
        messages=message_rule(on_cuda=parameter.device.type == "cuda"),
    )


def held_replicas(
    session: StrategySession, model: Sequence[Any], host: HostSettings, num_micro_batches: int
) -> HeldReplicas:
    """Return how many replicas exist at once on this rank in the largest iteration that is known of."""
    stage = PipelineStage(
        tuple(sum(isinstance(module, StrategyMoELayer) for module in chunk.modules()) for chunk in model),
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        group_size=get_model_config(model[0]).microbatch_group_size_per_vp_stage,
    )
    # Transformer Engine quantizes weights for each direction, and mxfp8 has a scale for every 32 elements.
    is_quantized = bool(host.fp8 or host.fp4)
    return HeldReplicas(
        session.strategy.replica_life,
        stage,
        _most_micro_batches(host, num_micro_batches),
        copy_bytes=2 * (1 + 1 / 32) if is_quantized else 0.0,
    )


def _most_micro_batches(host: HostSettings, announced: int) -> int:
    calculators = num_microbatches_calculator
    if calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:  # not every host has it
        return max(announced, 1)
    now = max(int(calculators.get_num_microbatches()), announced)
    if (schedule := host.step_batch_size_schedule) is None:
        return now
    steps = calculators.StepBatchsizeNumMicroBatchesCalculator._parse_schedule(schedule, None)
    largest = max(batch_size for _, batch_size in steps)
    return max(now, largest // (host.micro_batch_size * host.data_parallel_size))


def expert_optimizer(host: HostSettings) -> ExpertOptimizer:
    """Return what Megatron's optimizer keeps for every expert."""
    # States with a parameter's size: a momentum, or Adam's two moments.
    num_states = {"sgd": int(host.sgd_momentum != 0), "lion": 1, "muon": 1, "dist_muon": 1}
    return ExpertOptimizer(
        num_state_tensors=num_states.get(host.optimizer, 2),
        has_master_weights=host.fp16 or host.bf16,
        is_distributed=bool(host.use_distributed_optimizer),
    )
