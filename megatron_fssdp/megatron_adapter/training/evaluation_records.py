"""Records the losses of Megatron's evaluations."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training.global_vars import get_args

from megatron_fssdp.megatron_adapter.training.stage_records import gather
from megatron_fssdp.reporting.records.evaluations import Evaluation, append_evaluation


@dataclass
class _Running:
    """The evaluation that Megatron runs now.

    Attributes:
        iteration: Number of iterations for which the model has been trained.
        data: The evaluated data: ``validation`` or ``test``.
        number: Number of the next data set, from 0.
    """

    iteration: int = 0
    data: str = "validation"
    number: int = 0

    def next_data(self) -> str:
        """Return the name of the next data set."""
        args, number = get_args(), self.number
        self.number += 1
        if not getattr(args, "multiple_validation_sets", False):
            return self.data
        names = args.validation_set_names
        return f"{self.data} {names[number] if names else number}"


def wrap_evaluation(training: Any, record_dir: Callable[[], Path | None]) -> None:
    """Wrap Megatron's evaluation, so that its losses go to the run's records.

    Args:
        training: The module ``megatron.training.training``. Megatron looks up its functions there at call
            time.
        record_dir: Function that returns the folder of the run's records; ``None`` without records.
    """
    evaluate, evaluate_all = training.evaluate, training.evaluate_and_print_results
    signature, running = inspect.signature(evaluate_all), _Running()

    @wraps(evaluate_all)
    def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        # Megatron names the data only in the text that it prints.
        running.data = "test" if "test set" in given["prefix"] else "validation"
        running.iteration, running.number = int(given["iteration"]), 0
        return evaluate_all(*args, **kwargs)

    @wraps(evaluate)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        folder, (losses, _, has_stopped) = record_dir(), result
        if folder is not None and not has_stopped:
            _record(folder, running, losses)
        return result

    training.evaluate, training.evaluate_and_print_results = recorded, evaluate_and_print_results


def _record(folder: Path, running: _Running, losses: dict[str, Any]) -> None:
    """Write the losses of the last pipeline stage on global rank 0. All ranks call it."""
    own = {name: float(loss) for name, loss in losses.items()}
    of_stages = gather(own, parallel_state.get_pipeline_model_parallel_group())
    data = running.next_data()
    known = next((found for found in reversed(of_stages) if found), None)
    if dist.get_rank() == 0 and known is not None:
        append_evaluation(folder, Evaluation(running.iteration, data, known))
