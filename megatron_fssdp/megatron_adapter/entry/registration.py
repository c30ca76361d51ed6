"""Registers the plugin with Megatron's command line and training loop.

This module wraps Megatron's functions for runs of a script, once, and states the reason for each. Only what
layer specs and subclasses cannot change is wrapped.
"""

import argparse
import os
from datetime import timedelta
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any, Literal

import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_selection import resolve_strategy
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.megatron_adapter.checkpoints import optimizer_repairs, overwritten_checkpoint
from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_arguments import fit_checkpoint_arguments
from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_hints import (
    CheckpointHint,
    LoadHint,
    OwnerHint,
    StrategyHint,
    wrap_checkpointing,
)
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
from megatron_fssdp.megatron_adapter.entry.error_report import report_uncaught
from megatron_fssdp.megatron_adapter.layer.strategy_session import RequestedStrategy, StrategySession
from megatron_fssdp.megatron_adapter.layer.transfer_group import communicator_options
from megatron_fssdp.megatron_adapter.support.capabilities import check_seams
from megatron_fssdp.megatron_adapter.support.node_detection import check_declared_nodes
from megatron_fssdp.strategies.strategy import SelectsStrategies

_registered_by: Literal["nobody", "launcher", "script"] = "nobody"
_requested: RequestedStrategy | None = None


def requested_strategy() -> RequestedStrategy | None:
    """Return the strategy of the parsed command line; ``None`` before arguments are parsed."""
    return _requested


def register(by_launcher: bool = False) -> None:
    """Add the plugin to Megatron. Call this before Megatron parses its arguments.

    A script that calls this may also run under the launcher: its call then changes nothing. Under
    ``--moe-strategy none``, the default, Megatron computes bitwise the same results as without the plugin,
    with one exception: BERT gets the experts of ``--num-experts``, which Megatron ignores. A script that does
    not catch a :class:`ConfigurationError` ends with one line and exit code 2. On a machine without an
    accelerator, Megatron runs on the CPU (``megatron_adapter.cpu.cpu_runtime``).

    Raises:
        ConfigurationError: The installed Megatron lacks a seam that the plugin needs.
        RuntimeError: A script or the launcher called this twice.
    """
    global _registered_by
    if _registered_by == "launcher" and not by_launcher:
        _registered_by = "script"  # A second call of the script will be refused.
        return
    if _registered_by != "nobody":
        raise RuntimeError(
            "megatron_fssdp.register() was called twice; call it once, before Megatron parses its arguments"
        )
    if not by_launcher:
        report_uncaught()
    # The CPU patches must come before the first use of Megatron. On a GPU run they do nothing.
    cpu_runtime.install()
    check_seams(for_training=True)
    optimizer_repairs.install()
    _registered_by = "launcher" if by_launcher else "script"

    from megatron.training import arguments, training

    add_arguments, parse, validate = (
        arguments.add_megatron_arguments,
        arguments.parse_args,
        arguments.validate_args,
    )

    # parse_args builds the parser by calling this function of its module.
    @wraps(add_arguments)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_strategy_arguments(add_arguments(parser))

    # --yaml-cfg replaces all arguments and would remove the plugin's arguments without a warning.
    @wraps(parse)
    def parse_args(*args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)
        if not hasattr(parsed, "moe_strategy"):
            raise ConfigurationError(
                "--yaml-cfg: got Megatron's experimental YAML arguments, which replace --moe-strategy; "
                "wanted command-line arguments: remove --yaml-cfg, or use megatron-fssdp train CONFIG.yaml"
            )
        return parsed

    # This is the last step before process groups exist, so invalid input is refused here.
    @wraps(validate)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        cpu_runtime.check_arguments(args)
        check_started_as_rank()
        _resolve_request(args)
        return validate(args, *rest, **kwargs)

    arguments.add_megatron_arguments = add_megatron_arguments
    arguments.parse_args = parse_args
    arguments.validate_args = validate_args

    # Megatron looks up the functions of its training loop in this module at call time.
    from megatron_fssdp.megatron_adapter.training import training_hooks

    training_hooks.wrap_training(training, requested_strategy)

    # Megatron's BERT ignores --num-experts without a warning, under every strategy including `none`.
    if find_spec("megatron.core.models.bert") is not None:
        from megatron_fssdp.megatron_adapter.layer import bert_layers

        bert_layers.install()


def add_strategy_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--moe-strategy`` and its settings to Megatron's parser, and return the parser."""
    strategies = "; ".join(f"{name} ({entry.summary})" for name, entry in STRATEGIES.items())
    group = parser.add_argument_group(title="MoE strategy (megatron_fssdp)")
    group.add_argument(
        "--moe-strategy",
        default="none",
        metavar="NAME",
        # argparse formats help texts with the % operator, so a per cent sign must be doubled.
        help=f"How experts are placed: {strategies}.".replace("%", "%%"),
    )
    group.add_argument(
        "--moe-strategy-config",
        metavar="FILE.yaml",
        help="YAML file with the settings of the strategy, one flat key per line.",
    )
    group.add_argument(
        "--moe-strategy-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="One setting of the strategy, for example slots=2. It can be repeated and overrides the file.",
    )
    return parser


def check_started_as_rank() -> None:
    """Raise a ConfigurationError if variables of torchrun are missing, which a single rank needs too."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing and not dist.is_initialized():
        raise ConfigurationError(
            f"no ranks: {' and '.join(missing)} not set, wanted a process that torchrun has started; run "
            "torchrun --standalone --nproc-per-node=N -m megatron_fssdp SCRIPT.py ARGS…"
        )


def _resolve_request(args: Any) -> None:
    global _requested
    chosen = args.moe_strategy, args.moe_strategy_config, args.moe_strategy_set
    name, settings = resolve_strategy(*chosen)
    session = None
    if isinstance(settings, PlacementSettings):
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        session = StrategySession(name, settings, timeout, communicator_options(args))
        session.check_model(args)
        if session.strategy.moves_owners:
            fit_checkpoint_arguments(f"--moe-strategy {name}", args)
        if settings.nodes is not None:
            check_declared_nodes(settings.nodes, args.world_size)
        _build_our_layer(session)
        _follow_in_checkpoints(session)
    _requested = RequestedStrategy(name, settings, session)


def _build_our_layer(session: StrategySession) -> None:
    """Make Megatron's MoE specs build the strategy's layer. They look up the class at call time."""
    from megatron.core.models.gpt import moe_module_specs

    from megatron_fssdp.megatron_adapter.layer import hybrid_layers
    from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer

    layer = partial(StrategyMoELayer, session=session)
    moe_module_specs.MoELayer = layer
    hybrid_layers.install(layer)


def _follow_in_checkpoints(session: StrategySession) -> None:
    """Store owner map, loads and selected strategies in checkpoints, and refuse half-written checkpoints."""
    from megatron.training import checkpointing

    # Without re-sharding, owners stay Megatron's, and every checkpoint format can be saved.
    hints: list[CheckpointHint] = []
    if session.strategy.moves_owners:
        hints.append(OwnerHint(session.slots))
    if isinstance(session.strategy, SelectsStrategies):
        hints.append(StrategyHint(session.strategy, session.slots))
    if session.strategy.may_replicate(1) or hints:
        hints.append(LoadHint(session.slots, session.runtime))
        wrap_checkpointing(checkpointing, hints)
    overwritten_checkpoint.wrap_save(checkpointing.dist_checkpointing)
