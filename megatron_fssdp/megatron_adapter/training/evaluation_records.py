"""Records the losses of Megatron's evaluations."""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training.global_vars import get_args

from megatron_fssdp.megatron_adapter.training.stage_records import gather
from megatron_fssdp.reporting.records.evaluations import Evaluation, append_evaluation


def wrap_evaluation(training: Any, record_dir: Callable[[], Path | None]) -> None:
    """Wrap the evaluation of ``megatron.training.training``, so that its losses go to the run's records.

    ``record_dir`` returns the folder of these records, or ``None`` without records.
    """
    evaluate, evaluate_all = training.evaluate, training.evaluate_and_print_results
    signature, iteration, names = inspect.signature(evaluate_all), 0, _names("validation")

    @wraps(evaluate_all)
    def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
        nonlocal iteration, names
        given = signature.bind(*args, **kwargs).arguments
        # Megatron names the data only in the text that it prints.
        names = _names("test" if "test set" in given["prefix"] else "validation")
        iteration = int(given["iteration"])
        return evaluate_all(*args, **kwargs)

    @wraps(evaluate)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        folder, (losses, _, has_stopped) = record_dir(), result
        if folder is not None and not has_stopped:
            # The last pipeline stage has the losses, and global rank 0 writes them.
            own = {name: float(loss) for name, loss in losses.items()}
            of_stages = gather(own, parallel_state.get_pipeline_model_parallel_group())
            data, known = next(names), next((found for found in reversed(of_stages) if found), None)
            if dist.get_rank() == 0 and known is not None:
                append_evaluation(folder, Evaluation(iteration, data, known))
        return result

    training.evaluate, training.evaluate_and_print_results = recorded, evaluate_and_print_results


def _names(data: str) -> Iterator[str]:
    """Yield the names of the data sets that Megatron evaluates one after another."""
    for number in count():
        args = get_args()
        if not getattr(args, "multiple_validation_sets", False):
            yield data
        else:
            yield f"{data} {args.validation_set_names[number] if args.validation_set_names else number}"
