"""Wraps Megatron's training loop: begins and ends iterations, checks the built model, records iterations."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import log_single_rank
from megatron.training.global_vars import get_args

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.argument_reader import run_config_from_arguments
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.megatron_adapter.layer.launch_hooks import install_launch_hooks
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.layer.strategy_session import RequestedStrategy
from megatron_fssdp.megatron_adapter.training.equal_settings import check_equal_settings
from megatron_fssdp.megatron_adapter.training.evaluation_records import wrap_evaluation
from megatron_fssdp.megatron_adapter.training.iteration_driver import IterationDriver
from megatron_fssdp.megatron_adapter.training.run_recorder import RunRecorder, StepTimes
from megatron_fssdp.megatron_adapter.training.shared_refusal import refused_together
from megatron_fssdp.megatron_adapter.training.stopped_training import reporting_stop
from megatron_fssdp.megatron_adapter.training.training_boards import boards_are_asked_for
from megatron_fssdp.planning.native.kernel import kernel_form
from megatron_fssdp.reporting.records.recorded_settings import write_recorded_settings

logger = logging.getLogger(__name__)


@dataclass
class _Passes:
    """Clock of an iteration's forward and backward passes.

    Attributes:
        seconds: Seconds of the passes of this iteration until now.
    """

    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        if torch.cuda.is_available():
            # This wait costs nothing, because the optimizer waits for the norm of the gradients anyway.
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - started_s


def wrap_training(training: Any, requested_strategy: Callable[[], RequestedStrategy | None]) -> None:
    """Wrap the functions of Megatron's training loop.

    Args:
        training: The module ``megatron.training.training``. Megatron looks up its functions there at call
            time.
        requested_strategy: Function that returns the strategy of the parsed command line.
    """
    setup = training.setup_model_and_optimizer
    step = training.train_step
    recorder: list[RunRecorder] = []
    drivers: list[IterationDriver] = []
    passes = _Passes()

    @wraps(setup)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        requested = requested_strategy()
        to_boards = requested is not None and boards_are_asked_for()
        if requested is not None:
            check_equal_settings(requested, to_boards=to_boards)
        if to_boards and requested is not None and requested.session is not None:
            requested.session.runtime.measure = True  # Layers read this when they are built.
        built = setup(*args, **kwargs)
        if requested is not None:
            if requested.session is not None:
                report_installation(built[0], requested)
                install_launch_hooks(built[0])
                # Without an optimizer (--skip-train) the model is only evaluated: no owner ever moves.
                if built[1] is not None:
                    drivers.append(IterationDriver(requested.session, built[0], built[1], get_args()))
            if requested.settings.record_dir is not None or to_boards:
                record_dir = requested.settings.record_dir
                operations = training.num_floating_point_operations
                with refused_together():  # Only rank 0 writes files, so only it finds that it cannot.
                    if record_dir is not None and dist.get_rank() == 0:
                        describe_run(record_dir, built[0], requested)
                    recorder.append(RunRecorder(record_dir, requested.name, operations, to_boards=to_boards))
        return built

    @wraps(step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        passes.seconds = 0.0
        driver = drivers[-1] if drivers else None
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
        if recorder and recorder[0].wants_iteration and not refused:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # The step's kernels must be in its time.
            moved, selected = (None, None) if driver is None else (driver.reshard, driver.selection)
            times = StepTimes(time.perf_counter() - started_s, passes.seconds)
            recorder[0].record(result, loads, times, moved, selected)
        return result

    # Megatron's rerun state machine may repeat an iteration's passes inside train_step, so the beginning of
    # passes is detected here.
    get_schedule = training.get_forward_backward_func

    @wraps(get_schedule)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = get_schedule(*args, **kwargs)

        @wraps(schedule)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            driver = drivers[-1] if drivers else None
            trains = not kwargs.get("forward_only", False)
            if driver is not None:
                driver.begin_passes() if trains else driver.begin_evaluation()
            with passes.timed() if recorder and recorder[0].wants_iteration else nullcontext():
                results = schedule(*args, **kwargs)
            if driver is not None:
                driver.end_passes() if trains else driver.end_evaluation()
            return results

        return forward_backward

    train = training.train

    @wraps(train)
    def train_reporting_stop(*args: Any, **kwargs: Any) -> Any:
        with reporting_stop(get_args()) if drivers else nullcontext():
            return train(*args, **kwargs)

    def record_dir() -> Path | None:
        requested = requested_strategy()
        return None if requested is None else requested.settings.record_dir

    wrap_evaluation(training, record_dir)
    training.setup_model_and_optimizer = setup_model_and_optimizer
    training.train_step = train_step
    training.get_forward_backward_func = get_forward_backward_func
    training.train = train_reporting_stop


def describe_run(record_dir: Path, model: list[torch.nn.Module], requested: RequestedStrategy) -> None:
    """Write ``config.yaml`` beside the records, from Megatron's arguments.

    Args:
        record_dir: Folder of the run's records.
        model: Model chunks of this rank.
        requested: Strategy of the command line.
    """
    is_bert = any(type(module).__name__ == "BertModel" for chunk in model for module in chunk.modules())
    settings = requested.settings.model_dump(mode="json", exclude_defaults=True, exclude={"record_dir"})
    strategy = {"name": requested.name, "settings": settings}
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    run: RunConfig | None = None
    try:
        run = run_config_from_arguments(
            get_args(),
            "bert" if is_bert else "gpt",
            ranks_per_node,
            not torch.cuda.is_available(),
            strategy,
        )
    except ConfigurationError as error:
        logger.info(f"[fssdp] config.yaml has only the strategy, so simulate needs --model: {error}")
    write_recorded_settings(record_dir, run, strategy)


def report_installation(model: list[torch.nn.Module], requested: RequestedStrategy) -> None:
    """Check that the model has the strategy's layers, and log one line about them.

    With a wrong ``--spec``, Megatron builds its default model without a warning.

    Args:
        model: Model chunks of this rank.
        requested: Strategy of the command line.

    Raises:
        ConfigurationError: The model has no MoE layer, or an MoE layer is not the strategy's.
    """
    layers = [module for chunk in model for module in chunk.modules() if isinstance(module, MoELayer)]
    foreign = [layer for layer in layers if not isinstance(layer, StrategyMoELayer)]
    counts = torch.tensor([len(layers), len(foreign)], device=_collective_device())
    dist.all_reduce(counts)
    total, not_ours = counts.tolist()
    if total == 0 or not_ours:
        raise ConfigurationError(
            f"--moe-strategy {requested.name}: got {not_ours} MoE layers of {total} that are not the "
            "strategy's; wanted all of them. Build the model from Megatron's MoE specs or with --spec "
            "megatron_fssdp get_gpt_decoder_block_spec, or use --moe-strategy none"
        )
    log_single_rank(
        logger,
        logging.INFO,
        f"[fssdp] strategy {requested.name}: installed in {_describe(layers)}; "
        f"settings {requested.settings.model_dump(exclude_none=True, mode='json')}; "
        f"planning kernels: {kernel_form()}",
    )


def _describe(layers: list[StrategyMoELayer]) -> str:
    if not layers:
        return "the MoE layers of other pipeline stages; this stage has no MoE layer"
    context = layers[0].slot_layer.context
    numbers = ", ".join(str(layer.slot_layer.context.layer) for layer in layers)
    return (
        f"{len(layers)} MoE layers of this pipeline stage (layers {numbers}), "
        f"{context.num_experts} experts on {context.num_devices} devices "
        f"in {context.topology.num_nodes} node(s)"
    )


def _collective_device() -> torch.device:
    on_gpu = torch.cuda.is_available() and dist.get_backend() != "gloo"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
