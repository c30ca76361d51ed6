"""Wraps Megatron's training loop: begins and ends iterations, checks the built model, records iterations."""

import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import log_single_rank
from megatron.training.global_vars import get_args

from megatron_fssdp.config import run_lock
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.megatron_arguments import run_config_from_arguments
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.megatron_adapter.layer.launch_hooks import install_launch_hooks
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.layer.strategy_session import RequestedStrategy
from megatron_fssdp.megatron_adapter.training.equal_settings import (
    check_equal_settings,
    of_all_ranks,
    refused_together,
)
from megatron_fssdp.megatron_adapter.training.iteration_driver import IterationDriver
from megatron_fssdp.megatron_adapter.training.record_folder import record_folder
from megatron_fssdp.megatron_adapter.training.run_recorder import RunRecorder
from megatron_fssdp.megatron_adapter.training.stage_records import gather
from megatron_fssdp.megatron_adapter.training.stopped_training import reporting_stop
from megatron_fssdp.megatron_adapter.training.training_boards import boards_are_asked_for
from megatron_fssdp.planning.compiled_form import kernel_form
from megatron_fssdp.records.evaluations import Evaluation, append_evaluation
from megatron_fssdp.records.run_settings import write_recorded_settings

logger = logging.getLogger(__name__)


def wrap_training(training: Any, requested_strategy: Callable[[], RequestedStrategy | None]) -> None:
    """Wrap the training loop of ``megatron.training.training``, for the strategy of the command line."""
    setup, step, train = training.setup_model_and_optimizer, training.train_step, training.train
    get_schedule = training.get_forward_backward_func
    # Both exist when the model is built, if the run needs them.
    recorder: RunRecorder | None = None
    driver: IterationDriver | None = None
    passes_s = 0.0  # of the running iteration

    @wraps(setup)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        nonlocal driver, recorder
        requested = requested_strategy()
        if requested is None:
            return setup(*args, **kwargs)
        session, record_dir = requested.session, requested.settings.record_dir
        to_boards = boards_are_asked_for()
        check_equal_settings(requested, get_args(), to_boards=to_boards)
        if to_boards and session is not None:
            session.runtime.measure = True  # Layers read this when they are built.
        model, optimizer, *_ = built = setup(*args, **kwargs)
        if session is not None:
            _report_installation(model, requested)
            install_launch_hooks(model)
            # Without an optimizer (--skip-train) the model is only evaluated: no owner ever moves.
            if optimizer is not None:
                driver = IterationDriver(session, requested.name, model, optimizer, get_args())
        if record_dir is not None or to_boards:
            operations = training.num_floating_point_operations
            with refused_together():  # Only rank 0 writes files, so only it finds that it cannot.
                if record_dir is not None and dist.get_rank() == 0:
                    record_dir = _describe_run(record_dir, model, requested)
                recorder = RunRecorder(record_dir, requested.name, operations, to_boards)
        return built

    @wraps(step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes_s
        started_s, passes_s = time.perf_counter(), 0.0
        if driver is not None:
            driver.begin(get_args().curr_iteration, get_num_microbatches())
        try:
            result = step(*args, **kwargs)
        except Exception:
            if driver is not None:
                with suppress(RuntimeError):  # A broken device raises again when it is asked.
                    driver.report_non_finite()
            raise
        refused = result[3]  # Megatron refused a loss or a gradient and will end the run.
        if refused and driver is not None:
            driver.report_non_finite()
        loads = driver.end() if driver is not None else []
        if recorder is not None and recorder.wants_iteration and not refused:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # The step's kernels must be in its time.
            moved, selected = (None, None) if driver is None else (driver.reshard, driver.selection)
            recorder.record(result, loads, time.perf_counter() - started_s, passes_s, moved, selected)
        return result

    # Megatron's rerun state machine may repeat passes inside train_step, so their beginning is detected here.
    @wraps(get_schedule)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = get_schedule(*args, **kwargs)

        @wraps(schedule)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal passes_s
            runtime = None if driver is None else driver.runtime
            trains = not kwargs.get("forward_only", False)
            if runtime is not None:
                # An evaluation has replicas for the present weights and loads, and drops them at its end.
                runtime.begin_passes() if trains else runtime.begin_iteration(0)
            started_s = time.perf_counter()
            results = schedule(*args, **kwargs)
            if recorder is not None and recorder.wants_iteration:
                if torch.cuda.is_available():
                    # This wait costs nothing: the optimizer waits for the norm of the gradients anyway.
                    torch.cuda.synchronize()
                passes_s += time.perf_counter() - started_s
            if runtime is not None and trains:
                # DDP has completed gradients of experts that are trained; frozen ones are in no bucket.
                runtime.finish_gradients()
                runtime.end_passes()
            elif runtime is not None:
                runtime.end_iteration()
            return results

        return forward_backward

    @wraps(train)
    def train_reporting_stop(*args: Any, **kwargs: Any) -> Any:
        if driver is None:
            return train(*args, **kwargs)
        with reporting_stop(get_args()):
            try:
                return train(*args, **kwargs)
            finally:
                # Megatron may leave its loop by sys.exit. An error has a line of its own.
                if driver.balance is not None and not isinstance(sys.exception(), Exception):
                    driver.balance.tell_end(None if recorder is None else recorder.record_dir)

    _wrap_evaluation(training, lambda: None if recorder is None else recorder.record_dir)
    training.setup_model_and_optimizer = setup_model_and_optimizer
    training.train_step = train_step
    training.get_forward_backward_func = get_forward_backward_func
    training.train = train_reporting_stop


def _wrap_evaluation(training: Any, record_dir: Callable[[], Path | None]) -> None:
    """Wrap Megatron's evaluation, so that its losses go to the run's records, if it has a folder for them."""
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


def _describe_run(asked: Path, model: list[torch.nn.Module], requested: RequestedStrategy) -> Path:
    """Write ``config.yaml`` from Megatron's arguments, and return the folder that also gets the records."""
    is_bert = any(type(module).__name__ == "BertModel" for chunk in model for module in chunk.modules())
    settings = requested.settings.model_dump(mode="json", exclude_defaults=True, exclude={"record_dir"})
    strategy = {"name": requested.name, "settings": settings}
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    where = ranks_per_node, not torch.cuda.is_available()
    run: RunConfig | None = None
    try:
        run = run_config_from_arguments(get_args(), "bert" if is_bert else "gpt", *where, strategy)
    except ConfigurationError as error:
        logger.info(f"[fssdp] config.yaml has only the strategy, so simulate needs --model: {error}")
    folder = record_folder(asked, run, resumes=get_args().iteration > 0)
    run_lock.hold(folder, "record_dir")
    write_recorded_settings(folder, run, strategy)
    return folder


def _report_installation(model: list[torch.nn.Module], requested: RequestedStrategy) -> None:
    """Check that the model has the strategy's layers, and log one line about them. Collective.

    Raises:
        ConfigurationError: The model has no MoE layer, or an MoE layer is not the strategy's.
    """
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
    settings = requested.settings.model_dump(exclude_defaults=True, mode="json")
    shown = " ".join(f"{key}={value}" for key, value in settings.items()) or "all by default"
    log_single_rank(
        logger,
        logging.INFO,
        f"[fssdp] strategy {requested.name}: installed in {place}; settings: {shown}; {limits}"
        f"planning kernels: {kernel_form()}",
    )
