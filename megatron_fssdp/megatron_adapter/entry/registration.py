"""Adds the plugin to Megatron-LM's command line, on top of what :mod:`.attach` does in megatron-core."""

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

from megatron.training import arguments, global_vars, training

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files import run_lock
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
from megatron_fssdp.megatron_adapter.entry.argument_check import (
    add_strategy_arguments,
    check_devices,
    fit_to_cpu,
    requested_by,
)
from megatron_fssdp.megatron_adapter.entry.attach import use
from megatron_fssdp.megatron_adapter.entry.bad_input import report_uncaught
from megatron_fssdp.megatron_adapter.iterations.attachment import set_current
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostSettings
from megatron_fssdp.megatron_adapter.support import megatron_repairs
from megatron_fssdp.megatron_adapter.support.capabilities import check_seams
from megatron_fssdp.megatron_adapter.training.training_hooks import train_and_tell
from megatron_fssdp.megatron_adapter.wrapping import wrap


def register(by_launcher: bool = False) -> None:
    """Add the plugin to Megatron. Call this before Megatron parses its arguments; later calls change nothing.

    Under ``--moe-strategy none``, the default, Megatron computes bitwise the same results as without the
    plugin, with one exception: BERT gets the experts of ``--num-experts``, which Megatron ignores. A script
    that does not catch a :class:`ConfigurationError` ends with one line and exit code 2. On a machine without
    an accelerator, Megatron runs on the CPU (``megatron_adapter.cpu.cpu_runtime``).

    Raises:
        ConfigurationError: The installed Megatron lacks a seam that the plugin needs.
    """
    if not by_launcher:  # The launcher reports errors itself.
        report_uncaught()
    _wrap_megatron()


@cache  # once in a process
def _wrap_megatron() -> None:
    # The CPU patches must come before the first use of Megatron. On a GPU run they do nothing.
    on_cpu = cpu_runtime.install()
    check_seams(for_training=True)
    megatron_repairs.install()
    megatron_repairs.log_at_info(training.CustomHandler)

    is_said = False

    # --yaml-cfg replaces all arguments and would remove the plugin's arguments without a warning.
    def parse_args(parse: Any, *args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)
        if not hasattr(parsed, "moe_strategy"):
            raise ConfigurationError(
                "--yaml-cfg: got Megatron's experimental YAML arguments, which replace --moe-strategy; "
                "wanted command-line arguments: remove --yaml-cfg, or use megatron-fssdp train CONFIG.yaml"
            )
        nonlocal is_said
        if on_cpu and (changed := fit_to_cpu(parsed)) and parsed.rank == 0 and not is_said:
            is_said = True  # Megatron parses its arguments twice
            print(f"[fssdp] the ranks run on the CPU, so arguments are {changed}", flush=True)
        return parsed

    # This is the last step before process groups exist, so invalid input is refused here.
    def validate_args(validate: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        cpu_runtime.check_arguments(args)
        if not on_cpu:
            check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        requested = requested_by(args, _host_of(args))
        validated = validate(args, *rest, **kwargs)
        # Rank 0 holds the folder only when all ranks have come here.
        if (record_dir := requested.settings.record_dir) is not None:
            run_lock.refuse_live(record_dir, "record_dir")
        set_current(None) if requested.does_nothing else use(requested)
        return validated

    # parse_args builds the parser by calling this function of its module.
    wrap(arguments, "add_megatron_arguments", lambda add, parser: add_strategy_arguments(add(parser)))
    wrap(arguments, "parse_args", parse_args)
    wrap(arguments, "validate_args", validate_args)

    # Megatron looks up the functions of its training loop in this module at call time.
    wrap(training, "train", train_and_tell)

    # Megatron's BERT ignores --num-experts without a warning, under every strategy including `none`.
    if find_spec("megatron.core.models.bert") is not None:
        from megatron_fssdp.megatron_adapter.layer import bert_layers

        bert_layers.install()


def _host_of(args: Any) -> HostSettings:
    """What Megatron-LM's training loop says by its arguments and global variables."""
    return HostSettings(
        (args,),
        iteration=lambda: int(global_vars.get_args().curr_iteration),
        resumes=lambda: bool(global_vars.get_args().iteration > 0),
        flops=lambda batch_size: training.num_floating_point_operations(global_vars.get_args(), batch_size),
        boards=lambda: (global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()),
        has_boards=bool(getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", "")),
        exports_by_name=False,  # Checkpoints name experts, and copies by name are refused.
    )
