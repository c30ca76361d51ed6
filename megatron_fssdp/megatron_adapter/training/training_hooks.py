"""Wraps what only Megatron-LM's training loop has: its end, and its failures.

One line says where and why a training stopped, and from which checkpoint it can resume.
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    get_rerun_state_machine,
)
from megatron.training.global_vars import get_args

from megatron_fssdp.megatron_adapter.iterations.attachment import current
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.wrapping import wrap

logger = logging.getLogger(__name__)

_REFUSED = (EXIT_CODE_FAILED_ON_RESULT_VALIDATION, EXIT_CODE_RESUME_TO_DISAMBIGUATE)
_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron writes this file when a checkpoint is complete.


def wrap_training(training: Any) -> None:
    """Wrap the training loop of ``megatron.training.training``."""
    wrap(training, "train", _train)


def _train(train: Any, *args: Any, **kwargs: Any) -> Any:
    """Train, and say at the end how even the loads were; an error is logged with its place."""
    attachment = current()
    # Models that are only evaluated are none of ours, and none has nothing to say.
    model = next(iter(attachment.models), None) if attachment is not None else None
    if model is None or model.session is None:
        return train(*args, **kwargs)
    try:
        return train(*args, **kwargs)
    finally:
        error = sys.exception()
        # Megatron leaves its loop by an error or by sys.exit if it has refused a loss or a gradient.
        # It turns the check off for fp16, where loss scaling makes non-finite numbers normal.
        if error is not None and get_args().check_for_nan_in_loss_and_grad:
            report_non_finite(model.chunks, get_args(), error)
        if isinstance(error, Exception):
            report_stop(get_args(), error)
        elif model.driver is not None:
            model.driver.tell_end()


def report_stop(args: Any, error: Exception) -> None:
    """Log one line about an error that ends the training."""
    places = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    reason = (str(error).strip() or "no message").splitlines()[0]
    logger.error(
        f"[fssdp] rank {dist.get_rank()} stopped in iteration {_running_iteration(args)}{places}: "
        f"{type(error).__name__}: {reason}. If another rank stopped earlier, its log has the cause. "
        f"{how_to_go_on(args)}"
    )


def _running_iteration(args: Any) -> int:
    return int(args.curr_iteration) + 1  # as in Megatron's log


def how_to_go_on(args: Any) -> str:
    """Return a sentence that names the checkpoint from which the training can resume."""
    for folder in filter(None, (args.save, args.load)):
        with suppress(OSError, ValueError):  # A damaged file must not hide why the training stopped.
            iteration = (Path(folder) / _TRACKER).read_text().strip()
            return f"The last complete checkpoint is of iteration {iteration}: restart with --load {folder}"
    return "No checkpoint has been completed: set --save and --save-interval to be able to resume"


def report_non_finite(model: Iterable[torch.nn.Module], args: Any, error: BaseException) -> None:
    """Log in which MoE layer of this rank's model chunks parameters or gradients are not finite, if so.

    ``error`` ended the training. It waits for the device.
    """
    if isinstance(error, SystemExit) and error.code not in _REFUSED:
        return
    layers = [m for chunk in model for m in chunk.modules() if isinstance(m, StrategyMoELayer)]
    try:
        finding = next(chain(_in_parameters(layers), _in_gradients(layers)), None)
    except RuntimeError:  # A broken device raises again when it is asked.
        return
    if finding is None and get_rerun_state_machine().rerun_requested:
        finding = "parameters and gradients of this rank's MoE layers are finite: check the other layers"
    if finding is not None:
        logger.error(
            f"[fssdp] error on rank {dist.get_rank()}: iteration {_running_iteration(args)}: {finding}. "
            f"{how_to_go_on(args)}"
        )


def _in_parameters(layers: Iterable[StrategyMoELayer]) -> Iterator[str]:
    for layer in sorted(layers, key=_number):
        experts = layer.slot_layer.experts.parameters
        if bad := [expert for expert, parameters in experts.items() if not _are_finite(parameters)]:
            place = f"of MoE layer {_number(layer)}, which this rank owns"
            yield f"parameters of the experts {bad} {place}, are not finite"


def _in_gradients(layers: Iterable[StrategyMoELayer]) -> Iterator[str]:
    for layer in sorted(layers, key=_number, reverse=True):
        experts = chain.from_iterable(layer.slot_layer.experts.parameters.values())
        gradients = (getattr(p, "main_grad", p.grad) for p in chain(layer.router.parameters(), experts))
        if not _are_finite(gradient for gradient in gradients if gradient is not None):
            yield (
                f"MoE layer {_number(layer)} is the last one with non-finite gradients: check this layer and "
                "the layers after it"
            )


def _number(layer: StrategyMoELayer) -> int:
    return layer.slot_layer.context.layer


def _are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors)
