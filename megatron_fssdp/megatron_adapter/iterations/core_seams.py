"""Where megatron-core tells what a training loop does: the seams on which iterations stand.

All loops call these places of megatron-core, whichever host they belong to. Methods of classes are wrapped,
and functions that a module looks up when it calls them. So hosts that have imported them by name come here::

    schedules.forward_backward_*           passes begin; says how many micro-batches, and whether they train
    DistributedDataParallel.__init__       a model joins
    _ParamAndGradBuffer.reset              gradients are set to zero: an open iteration is dropped
    DistributedDataParallel.start_grad_sync, finish_grad_sync, scale_gradients
                                           a rank without passes joins the iteration of the others
    the latter, prepare_grads and get_grad_norm of optimizers
                                           replicas' gradients come home before
    step, step_with_ready_grads of optimizers
                                           the iteration ends, once
    states of optimizers by position       experts that have moved are refused
    MoELayer.route                         counts under ``none``; layers that train without the strategy are
                                           refused
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_model_config

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.megatron_adapter.experts.named_copies import refuse_moved
from megatron_fssdp.megatron_adapter.iterations.attachment import current
from megatron_fssdp.megatron_adapter.iterations.host_settings import mark, model_of, models_of, note_optimizer
from megatron_fssdp.megatron_adapter.iterations.model_iterations import ModelIterations
from megatron_fssdp.megatron_adapter.iterations.stock_loads import count
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.wrapping import wrap

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
_OPTIMIZERS = (optimizers.ChainedOptimizer, optimizers.MixedPrecisionOptimizer, optimizers.FP32Optimizer)


@cache  # once in a process
def install() -> None:
    """Wrap the seams. Without an attached strategy, they change nothing."""
    for name in _SCHEDULES:
        wrap(schedules, name, _run_passes)
    wrap(DistributedDataParallel, "__init__", _wrap_model)
    for name in ("start_grad_sync", "finish_grad_sync", "scale_gradients"):
        wrap(DistributedDataParallel, name, _join)
    wrap(DistributedDataParallel, "scale_gradients", _when_home)
    wrap(_ParamAndGradBuffer, "reset", _reset)
    wrap(MoELayer, "route", _route)
    wrap(optimizers.MegatronOptimizer, "__init__", note_optimizer)
    wrap(optimizers.ChainedOptimizer, "__init__", note_optimizer)
    for kind in _OPTIMIZERS:
        wrap(kind, "step", _step)
        wrap(kind, "step_with_ready_grads", _step_alone)
        wrap(kind, "prepare_grads", _when_home)
        wrap(kind, "get_grad_norm", _when_home)
    for name in ("sharded_param_state_dp_reshardable", "sharded_param_state_dp_zero"):
        wrap(DistributedOptimizer, name, _by_position)
    wrap(DistributedOptimizer, "load_state_dict", _load_states)
    for kind in (optimizers.FP32Optimizer, optimizers.Float16OptimizerWithFloat16Params):
        wrap(kind, "state_dict", _by_position)
        wrap(kind, "load_state_dict", _load_states)
        wrap(kind, "load_state_dict", _by_position)


def _wrap_model(
    init: Any, self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any
) -> None:
    attachment = current()
    # DDP makes hooks for the experts' Parameters, so their layers must have joined before.
    model = None if attachment is None else attachment.take(config, ddp_config, module)
    init(self, config, ddp_config, module, *args, **kwargs)
    if model is None:
        return
    model.add(self)
    mark([self, *self.buffers, *self.expert_parallel_buffers, *module.parameters()], model)


def _run_passes(schedule: Any, *args: Any, **kwargs: Any) -> Any:
    chunks = kwargs["model"] if isinstance(kwargs["model"], list | tuple) else [kwargs["model"]]
    models = {id(model): model for chunk in chunks if (model := model_of(chunk)) is not None}
    with ExitStack() as surrounded:
        if kwargs.get("forward_only"):
            for model in models.values():
                surrounded.enter_context(model.evaluation())
            return schedule(*args, **kwargs)
        told = [
            surrounded.enter_context(model.passes(kwargs["num_microbatches"])) for model in models.values()
        ]
        surrounded.enter_context(_home_before_finalizing(get_model_config(chunks[0]), models.values()))
        results = schedule(*args, **kwargs)
        for facts in told:
            facts.note(results, kwargs)
    return results


@contextmanager
def _home_before_finalizing(config: Any, models: Collection[ModelIterations]) -> Iterator[None]:
    """Bring gradients home before a function of the loop's own, or the loop itself, may read them."""
    finalize = config.finalize_model_grads_func

    def finalize_at_home(*args: Any, **kwargs: Any) -> Any:
        for model in models:
            model.finish_gradients()
        return finalize(*args, **kwargs)

    if finalize is not None and models:
        config.finalize_model_grads_func = finalize_at_home
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize
    if finalize is None:
        for model in models:
            model.finish_gradients()


def _reset(reset: Any, buffer: Any) -> None:
    # First wait for transfers on their way, because they end by adding to gradients.
    if (model := model_of(buffer)) is not None:
        model.drop()
    reset(buffer)


def _join(change: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
    if (model := model_of(ddp)) is None:
        return change(ddp, *args, **kwargs)
    model.join()
    with model.following():
        return change(ddp, *args, **kwargs)


def _when_home(read: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    is_model = isinstance(self, DistributedDataParallel)
    for model in filter(None, [model_of(self)]) if is_model else models_of(self):
        model.finish_gradients()
    return read(self, *args, **kwargs)


def _step(step: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    ending = list[ModelIterations]()
    try:
        ending += (model for model in models_of(self) if model.begin_step(self))
        results = step(self, *args, **kwargs)
    finally:
        for model in ending:
            model.is_stepping = False
    for model in models_of(self):
        if model in ending:
            model.end_step(*results)
        else:
            model.note_more_steps()
    return results


def _step_alone(step: Any, self: Any) -> Any:
    # Some loops prepare and clip gradients by themselves. The norm of the gradients is not known here.
    return _step(lambda self: (step(self), None), self)[0]


def _by_position(state: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    # The model's sharded_state_dict brings experts home if its metadata name the same format.
    for model in models_of(self):
        if model.session is not None:
            refuse_moved(model.session.slots, "optimizer states by their positions")
    return state(self, *args, **kwargs)


def _load_states(load: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    load(self, *args, **kwargs)
    for model in models_of(self):
        if model.driver is not None:
            model.driver.forget_weights()


def _route(route: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    attachment = current()
    if (
        not isinstance(layer, StrategyMoELayer)
        and attachment is not None
        and isinstance(attachment.settings, PlacementSettings)
        and torch.is_grad_enabled()
        and layer.training
        # Models that DDP has wrapped under ``none`` stay Megatron's own.
        and any(
            parameter.requires_grad and model_of(parameter) is None
            for parameter in layer.experts.parameters()
        )
    ):
        raise ConfigurationError(
            f"--moe-strategy {attachment.name}: got a training pass of MoE layer {layer.layer_number}, which "
            "is not the strategy's, wanted layers that have joined; attach the strategy before Megatron's "
            "DistributedDataParallel wraps the model (no other wrapper is served), or use --moe-strategy none"
        )
    result = route(layer, *args, **kwargs)
    count(layer, result[1])
    return result
