"""Wraps what only Megatron-LM's training loop has: its end, its failures, and its evaluations in records."""

import inspect
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch.distributed as dist
from megatron.training.global_vars import get_args

from megatron_fssdp.megatron_adapter.all_ranks import of_all_ranks
from megatron_fssdp.megatron_adapter.iterations.attachment import current
from megatron_fssdp.megatron_adapter.iterations.model_iterations import ModelIterations
from megatron_fssdp.megatron_adapter.training.stopped_training import report_non_finite, reporting_stop
from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.records.metrics import Evaluation, append_evaluation


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
        with reporting_stop(get_args()):
            try:
                return train(*args, **kwargs)
            finally:
                error = sys.exception()
                # Megatron leaves its loop by an error or by sys.exit if it has refused a loss or a gradient.
                # It turns the check off for fp16, where loss scaling makes non-finite numbers normal.
                if error is not None and get_args().check_for_nan_in_loss_and_grad:
                    report_non_finite(model.chunks, get_args(), error)
                if model.driver is not None and not isinstance(error, Exception):
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
