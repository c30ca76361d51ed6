"""Registers the plugin with Megatron's command line and training loop.

This module wraps Megatron's functions for runs of a script, once, and states the reason for each. Only what
layer specs and subclasses cannot change is wrapped: the argument parser and its checks, the class that
Megatron's specs build, the check of the built model, and the beginning and end of iterations.
"""

import os
from datetime import timedelta
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any, Literal

import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.megatron_adapter.checkpoints import optimizer_repairs, overwritten_checkpoint
from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_arguments import check_checkpoint_arguments
from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_hints import (
    CheckpointHint,
    OwnerHint,
    StrategyHint,
    wrap_checkpointing,
)
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
from megatron_fssdp.megatron_adapter.entry.arguments import add_strategy_arguments, resolve_arguments
from megatron_fssdp.megatron_adapter.entry.error_report import report_uncaught
from megatron_fssdp.megatron_adapter.layer.strategy_session import RequestedStrategy, StrategySession
from megatron_fssdp.megatron_adapter.layer.transfer_group import communicator_options
from megatron_fssdp.megatron_adapter.support.capabilities import check_training
from megatron_fssdp.megatron_adapter.support.node_detection import check_declared_nodes
from megatron_fssdp.megatron_adapter.support.replaced_settings import (
    CHECKPOINT_REPLACEMENTS,
    replace_settings,
)
from megatron_fssdp.strategies.strategy import SelectsStrategies

_registered_by: Literal["nobody", "launcher", "script"] = "nobody"
_requested: RequestedStrategy | None = None


def requested_strategy() -> RequestedStrategy | None:
    """Return the strategy of the parsed command line; ``None`` before arguments are parsed."""
    return _requested


def register(by_launcher: bool = False) -> None:
    """Add the plugin to Megatron. Call this before Megatron parses its arguments.

    The launcher calls this for unmodified scripts. A script that also calls it may run under the launcher:
    its call then changes nothing. Under ``--moe-strategy none``, the default, Megatron computes bitwise the
    same results as without the plugin, with one exception: BERT gets the experts of ``--num-experts``, which
    Megatron ignores. A script that does not catch a :class:`ConfigurationError` ends with one line and exit
    code 2.

    Args:
        by_launcher: Whether the launcher calls this. The launcher reports errors itself.

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
    check_training()
    optimizer_repairs.install()
    _registered_by = "launcher" if by_launcher else "script"

    from megatron.training import arguments, training

    add_arguments, parse = arguments.add_megatron_arguments, arguments.parse_args
    validate = arguments.validate_args

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


def check_started_as_rank() -> None:
    """Raise if Megatron could not find the other ranks. A single rank needs a launcher such as torchrun too.

    Raises:
        ConfigurationError: Environment variables that torchrun sets are missing.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing and not dist.is_initialized():
        raise ConfigurationError(
            f"no ranks: {' and '.join(missing)} not set, wanted a process that torchrun has started; run "
            "torchrun --standalone --nproc-per-node=N -m megatron_fssdp SCRIPT.py ARGS…"
        )


def _resolve_request(args: Any) -> None:
    global _requested
    name, settings = resolve_arguments(args)
    session = None
    if isinstance(settings, PlacementSettings):
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        session = StrategySession(name, settings, timeout, communicator_options(args))
        session.check_model(args)
        if session.strategy.moves_owners:
            check_checkpoint_arguments(args)
            replace_settings(f"--moe-strategy {name}", CHECKPOINT_REPLACEMENTS, args)
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
    """Store owner map and selected strategies in checkpoints, and refuse half-written checkpoints."""
    from megatron.training import checkpointing

    # Without re-sharding, owners stay Megatron's, and every checkpoint format can be saved.
    hints: list[CheckpointHint] = []
    if session.strategy.moves_owners:
        hints.append(OwnerHint(session.slots.stage_owners, session.slots.adopt))
    if isinstance(session.strategy, SelectsStrategies):
        hints.append(StrategyHint(session.strategy, session.slots.layer_numbers))
    if hints:
        wrap_checkpointing(checkpointing, hints)
    overwritten_checkpoint.wrap_save(checkpointing.dist_checkpointing)
