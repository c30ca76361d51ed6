"""Wraps Megatron's training loop: begins and ends iterations, checks the built model, records iterations."""

import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import log_single_rank
from megatron.training.global_vars import get_args

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.all_ranks import of_all_ranks
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer, install_beginnings
from megatron_fssdp.megatron_adapter.layer.strategy_session import RequestedStrategy
from megatron_fssdp.megatron_adapter.training.equal_settings import check_equal_settings, refused_together
from megatron_fssdp.megatron_adapter.training.iteration_driver import IterationDriver
from megatron_fssdp.megatron_adapter.training.record_folder import describe_run
from megatron_fssdp.megatron_adapter.training.run_recorder import RunRecorder, boards_are_asked_for
from megatron_fssdp.megatron_adapter.training.stopped_training import report_non_finite, reporting_stop
from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.planning.compiled_form import kernel_form
from megatron_fssdp.records.metrics import Evaluation
from megatron_fssdp.records.metrics_file import append_evaluation

logger = logging.getLogger(__name__)


def wrap_training(training: Any, requested_strategy: Callable[[], RequestedStrategy | None]) -> None:
    """Wrap the training loop of ``megatron.training.training``, for the strategy of the command line."""
    hooks = TrainingHooks(requested_strategy)
    wrap(training, "setup_model_and_optimizer", hooks.setup_model_and_optimizer)
    wrap(training, "train", hooks.train)
    wrap(training, "train_step", hooks.train_step)
    wrap(training, "get_forward_backward_func", hooks.get_forward_backward_func)
    wrap(training, "evaluate", hooks.evaluate)
    wrap(training, "evaluate_and_print_results", hooks.evaluate_and_print_results)


class TrainingHooks:
    """What happens in one training around Megatron's functions, which the methods get as first argument."""

    def __init__(self, requested_strategy: Callable[[], RequestedStrategy | None]) -> None:
        self._requested_strategy = requested_strategy
        # They exist when the model is built, if the run needs them.
        self._model: list[torch.nn.Module] = []
        self._driver: IterationDriver | None = None
        self._recorder: RunRecorder | None = None
        self._passes_s = 0.0  # of the running iteration
        # Iteration of an evaluation, and names of its data sets.
        self._evaluated: tuple[int, Iterator[str]] = 0, iter(())

    def setup_model_and_optimizer(self, setup: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the model, check it, and prepare iterations and records."""
        if (requested := self._requested_strategy()) is None:
            return setup(*args, **kwargs)
        session, record_dir = requested.session, requested.settings.record_dir
        to_boards = boards_are_asked_for()
        check_equal_settings(requested, get_args(), to_boards=to_boards)
        if to_boards and session is not None:
            session.runtime.measure = True  # Layers read this when they are built.
        model, optimizer, *_ = built = setup(*args, **kwargs)
        if session is not None:
            self._model = model
            _report_installation(model, requested)
            install_beginnings(model)
            # Without an optimizer (--skip-train) the model is only evaluated: no owner ever moves.
            if optimizer is not None:
                self._driver = IterationDriver(session, requested.name, model, optimizer, get_args())
        if record_dir is not None or to_boards:
            with refused_together():  # Only rank 0 writes files, so only it finds that it cannot.
                if record_dir is not None and dist.get_rank() == 0:
                    record_dir = describe_run(record_dir, model, requested)
                self._recorder = RunRecorder(record_dir, requested.name, to_boards)
        return built

    def train(self, train: Any, *args: Any, **kwargs: Any) -> Any:
        """Train, and say at the end how even the loads were; an error is logged with its place."""
        if self._driver is None:
            return train(*args, **kwargs)
        with reporting_stop(get_args()):
            try:
                return train(*args, **kwargs)
            finally:
                # Megatron may leave its loop by sys.exit. An error has a line of its own.
                balance, recorder = self._driver.balance, self._recorder
                if balance is not None and not isinstance(sys.exception(), Exception):
                    balance.tell_end(None if recorder is None else recorder.record_dir)

    def train_step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an iteration between the begin and the end of the driver's, and record it."""
        driver, recorder = self._driver, self._recorder
        started_s, self._passes_s = time.perf_counter(), 0.0
        if driver is not None:
            driver.begin(get_args().curr_iteration, get_num_microbatches())
        refused = True
        try:
            result = step(*args, **kwargs)
            refused = result[3]  # Megatron refused a loss or a gradient and will end the run.
        finally:
            # Megatron turns the check off for fp16, where loss scaling makes non-finite numbers normal.
            if refused and driver is not None and get_args().check_for_nan_in_loss_and_grad:
                with suppress(RuntimeError):  # A broken device raises again when it is asked.
                    report_non_finite(self._model, get_args())
        loads = driver.end() if driver is not None else []
        if recorder is not None and recorder.wants_iteration and not refused:
            _synchronize()  # The step's kernels must be in its time.
            moved, selected = (None, None) if driver is None else (driver.reshard, driver.selection)
            iteration_s = time.perf_counter() - started_s
            recorder.record(result, loads, iteration_s, self._passes_s, moved, selected)
        return result

    def get_forward_backward_func(self, get_schedule: Any, *args: Any, **kwargs: Any) -> Any:
        """Return Megatron's schedule of passes, wrapped here because ``train_step`` may repeat passes."""
        schedule = get_schedule(*args, **kwargs)
        return wraps(schedule)(partial(self._forward_backward, schedule))

    def _forward_backward(self, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = None if self._driver is None else self._driver.runtime
        trains = not kwargs.get("forward_only", False)
        if runtime is not None:
            # An evaluation has replicas for the present weights and loads, and drops them at its end.
            runtime.begin_passes() if trains else runtime.begin_iteration(0)
        started_s = time.perf_counter()
        results = schedule(*args, **kwargs)
        if self._recorder is not None and self._recorder.wants_iteration:
            _synchronize()  # This wait costs nothing: the optimizer waits for the gradients' norm anyway.
            self._passes_s += time.perf_counter() - started_s
        if runtime is not None and trains:
            # DDP has completed gradients of experts that are trained; frozen ones are in no bucket.
            runtime.finish_gradients()
            runtime.end_passes()
        elif runtime is not None:
            runtime.end_iteration()
        return results

    def evaluate_and_print_results(self, evaluate_all: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; note the iteration and the data, which Megatron names only in what it prints."""
        given = inspect.signature(evaluate_all).bind(*args, **kwargs).arguments
        data = "test" if "test set" in given["prefix"] else "validation"
        self._evaluated = int(given["iteration"]), _names_of_sets(data)
        return evaluate_all(*args, **kwargs)

    def evaluate(self, evaluate: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one data set; its losses go to the run's records, if it has a folder for them."""
        losses, _, has_stopped = result = evaluate(*args, **kwargs)
        if self._recorder is not None and self._recorder.record_dir is not None and not has_stopped:
            # The last pipeline stage has the losses, and global rank 0 writes them.
            of_ranks = of_all_ranks({name: float(loss) for name, loss in losses.items()})
            iteration, names = self._evaluated
            data, known = next(names, "validation"), next((one for one in reversed(of_ranks) if one), None)
            if dist.get_rank() == 0 and known is not None:
                append_evaluation(self._recorder.record_dir, Evaluation(iteration, data, known))
        return result


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _names_of_sets(data: str) -> Iterator[str]:
    """Yield the names of the data sets that Megatron evaluates one after another."""
    for number in count():
        args = get_args()
        if not getattr(args, "multiple_validation_sets", False):
            yield data
        else:
            yield f"{data} {args.validation_set_names[number] if args.validation_set_names else number}"


def _report_installation(model: list[torch.nn.Module], requested: RequestedStrategy) -> None:
    """Check that all MoE layers are the strategy's, and log one line about them. Collective."""
    layers = [module for chunk in model for module in chunk.modules() if isinstance(module, MoELayer)]
    ours = [layer for layer in layers if isinstance(layer, StrategyMoELayer)]
    total, num_ours = map(sum, zip(*of_all_ranks((len(layers), len(ours))), strict=True))
    if total == 0 or num_ours < total:
        raise ConfigurationError(
            f"--moe-strategy {requested.name}: got {total - num_ours} MoE layers of {total} that are not the "
            "strategy's; wanted all of them. Build the model from Megatron's MoE specs or with --spec "
            "megatron_fssdp get_gpt_decoder_block_spec, or use --moe-strategy none"
        )
    place, limits = "the MoE layers of other pipeline stages; this stage has no MoE layer", ""
    session = requested.session
    if ours and session is not None:
        context = ours[0].slot_layer.context
        numbers = ", ".join(str(layer.slot_layer.context.layer) for layer in ours)
        place = (
            f"{len(ours)} MoE layers of this pipeline stage (layers {numbers}), {context.num_experts} "
            f"experts on {context.num_devices} devices in {context.topology.num_nodes} node(s)"
        )
        measured = session.strategy.profile_iterations
        limits = f"{session.strategy.limits(context)}; "
        if measured:
            limits = f"costs are measured in the first {measured} iterations, which have no replicas; "
        if requested.name == "parm" and get_args().tensor_model_parallel_size == 1:
            limits = f"without tensor parallelism, {requested.name} is the same as ep; "
    settings = requested.settings.model_dump(exclude_defaults=True, mode="json")
    shown = " ".join(f"{key}={value}" for key, value in settings.items()) or "all by default"
    log_single_rank(
        logger,
        logging.INFO,
        f"[fssdp] strategy {requested.name}: installed in {place}; settings: {shown}; {limits}"
        f"planning kernels: {kernel_form()}",
    )
