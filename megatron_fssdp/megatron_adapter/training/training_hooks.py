"""Wraps what only Megatron-LM's training loop has: its end, its failures, and its evaluations in records.

One line says where and why a training stopped, and from which checkpoint it can resume.
"""

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, count
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

from megatron_fssdp.megatron_adapter.all_ranks import of_all_ranks
from megatron_fssdp.megatron_adapter.iterations.attachment import current
from megatron_fssdp.megatron_adapter.iterations.model_iterations import ModelIterations
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.records.metrics import Evaluation, append_evaluation

logger = logging.getLogger(__name__)

_REFUSED = (EXIT_CODE_FAILED_ON_RESULT_VALIDATION, EXIT_CODE_RESUME_TO_DISAMBIGUATE)
_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron writes this file when a checkpoint is complete.


def wrap_training(training: Any) -> None:
    """Wrap the training loop of ``megatron.training.training``."""
    hooks = TrainingHooks()
    wrap(training, "train", hooks.train)
    wrap(training, "evaluate", hooks.evaluate)
    wrap(training, "evaluate_and_print_results", hooks.evaluate_and_print_results)


class TrainingHooks:
    """What happens in one training around Megatron's functions, which the methods get as first argument."""

    def __init__(self) -> None:
        # Iteration of an evaluation, and names of its data sets.
        self._evaluated: tuple[int, Iterator[str]] = 0, iter(())
        self._alone: ModelIterations | None = None  # A model that is only evaluated, so DDP does not wrap it.

    def _model(self) -> ModelIterations | None:
        """The model of the program, if something was attached."""
        if (attachment := current()) is None:
            return None
        if not attachment.models and self._alone is None:
            self._alone = ModelIterations(attachment.name, attachment.settings, attachment.host, None)
        return next(iter(attachment.models), self._alone)

    def train(self, train: Any, *args: Any, **kwargs: Any) -> Any:
        """Train, and say at the end how even the loads were; an error is logged with its place."""
        if (model := self._model()) is None or model.session is None:
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

    def evaluate_and_print_results(self, evaluate_all: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; note the iteration and the data, which Megatron names only in what it prints."""
        given = inspect.signature(evaluate_all).bind(*args, **kwargs).arguments
        data = "test" if "test set" in given["prefix"] else "validation"
        self._evaluated = int(given["iteration"]), _names_of_sets(data)
        return evaluate_all(*args, **kwargs)

    def evaluate(self, evaluate: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one data set; its losses go to the run's records, if it has a folder for them."""
        losses, _, has_stopped = result = evaluate(*args, **kwargs)
        if (model := self._model()) is not None:
            model.open_records()  # Without training, nobody else does.
        recorder = None if model is None else model.recorder
        if recorder is not None and recorder.record_dir is not None and not has_stopped:
            # The last pipeline stage has the losses, and global rank 0 writes them.
            of_ranks = of_all_ranks({name: float(loss) for name, loss in losses.items()})
            iteration, names = self._evaluated
            data = next(names, "validation")
            known = next((answer for answer in reversed(of_ranks) if answer), None)
            if dist.get_rank() == 0 and known is not None:
                append_evaluation(recorder.record_dir, Evaluation(iteration, data, known))
        return result


def _names_of_sets(data: str) -> Iterator[str]:
    """Yield the names of the data sets that Megatron evaluates one after another."""
    for number in count():
        args = get_args()
        if not getattr(args, "multiple_validation_sets", False):
            yield data
        else:
            yield f"{data} {args.validation_set_names[number] if args.validation_set_names else number}"


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
