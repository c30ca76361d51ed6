"""The check of a training's arguments, in one process and in seconds, before any rank starts.

Ranks run the same checks when Megatron validates its arguments (:mod:`.registration`).
"""

import argparse
import os
import traceback
from collections.abc import Sequence
from inspect import unwrap
from typing import Any, NoReturn
from unittest import mock

import torch
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import argument_utils, arguments

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import closest
from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.megatron_arguments import ON_CPU
from megatron_fssdp.config.run.megatron_options import quiet_output
from megatron_fssdp.config.strategy.strategy_registry import resolve_strategy
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
from megatron_fssdp.megatron_adapter.entry.attach import add_strategy_options
from megatron_fssdp.megatron_adapter.iterations.attachment import Attachment
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostSettings
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.megatron_adapter.support.capabilities import check_seams
from megatron_fssdp.megatron_adapter.support.node_detection import check_declared_nodes

# Switches with the same results as Megatron's code without them: those of kernels, and of saves beside the
# training, because the process that writes them divides by the number of GPUs, and ranks would wait for it.
_NEED_A_GPU = (
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"),
    *("use_flash_attn", "tp_comm_overlap", "async_save"),
)

_defaults: dict[str, Any] = {}  # of Megatron's arguments; those that a script adds are not in it


def check_arguments(
    words: Sequence[str],
    world_size: int,
    *,
    on_cpu: bool,
    ranks_here: int | None = None,  # None: they start on machines whose devices are not known here
    script_text: str = "",  # source of the script, which may add arguments of its own
) -> str:
    """Check a training's command as its ranks would, and what this machine lacks; return the strategy.

    Raises:
        ConfigurationError: The ranks would end with an error.
    """
    if ranks_here is not None and not on_cpu:
        check_devices(ranks_here)
    check_seams(for_training=True)
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_strategy_arguments(unwrap(arguments.add_megatron_arguments)(parser))
    with quiet_output():
        args, unknown = parser.parse_known_args(list(words))
    for word in unknown:
        if word.startswith("--") and word.partition("=")[0] not in script_text:
            near = closest(word, [flag for action in parser._actions for flag in action.option_strings])
            hint = f"did you mean {near}?" if near else "remove it"
            raise ConfigurationError(f"{word}: neither Megatron nor the plugin has this argument; {hint}")
    args.rank, args.world_size = 0, world_size
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    if on_cpu:
        cpu_runtime.check_arguments(args)
        fit_to_cpu(args)
    strategy = requested_by(args).name
    if on_cpu or ranks_here is not None:
        _validate(args, on_cpu, with_tokenizer=ranks_here is not None and args.tokenizer_model is not None)
    return strategy


def check_devices(num_ranks: int) -> None:
    """Raise a ConfigurationError unless torch finds a CUDA device for each of this machine's ranks."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus < num_ranks:
        raise ConfigurationError(
            f"devices: got {num_ranks} ranks on GPUs, but torch finds {num_gpus} on this machine, wanted one "
            "for each; start fewer ranks, or run on the CPU (training.device=cpu, "
            f"{cpu_runtime.DEVICE_VARIABLE}=cpu)"
        )


def add_strategy_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--moe-strategy`` and its settings to Megatron's parser, and return the parser.

    It then raises a ConfigurationError where it would print the usage of hundreds of arguments.
    """

    def refuse(message: str) -> NoReturn:
        raise ConfigurationError(message)

    parser.error = refuse  # type: ignore[method-assign]
    # Of several actions for one argument, the first has the default. A text is parsed like a given one.
    for action in reversed(parser._actions):
        _defaults[action.dest] = (
            parser._get_value(action, action.default) if type(action.default) is str else action.default
        )
    add_strategy_options(parser.add_argument_group(title="MoE strategy (megatron_fssdp)"))
    return parser


def fit_to_cpu(args: Any) -> str:
    """Give parsed arguments the values that the CPU needs; return what was changed, or an empty text."""
    added = {name: value for name, value in ON_CPU.items() if getattr(args, name, value) != value}
    removed = [name for name in _NEED_A_GPU if getattr(args, name, False)]
    for name, value in {**added, **dict.fromkeys(removed, False)}.items():
        setattr(args, name, value)
    flags = (f"--{name.replace('_', '-')}" for name in removed)
    texts = {"added": megatron_options.words(added), "removed": flags}
    told = ((verb, " ".join(words)) for verb, words in texts.items())
    return "; ".join(f"{verb} {words}" for verb, words in told if words)


def requested_by(args: Any, host: HostSettings | None = None) -> Attachment:
    """Return the strategy of parsed arguments; refuse a model or an argument that it does not support."""
    name = args.moe_strategy
    settings = resolve_strategy(name, args.moe_strategy_config, args.moe_strategy_set)
    if isinstance(settings, PlacementSettings):
        StrategySession(name, settings).check_model(args, defaults=_defaults)
        if settings.nodes is not None:
            check_declared_nodes(settings.nodes, args.world_size)
    return Attachment(name, settings, host)


def _validate(args: Any, on_cpu: bool, *, with_tokenizer: bool) -> None:
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")}
    if on_cpu:
        variables[cpu_runtime.DEVICE_VARIABLE] = "cpu"
    try:
        with mock.patch.dict(os.environ, variables), quiet_output():
            cpu_runtime.install()
            unwrap(arguments.validate_args)(args)
            argument_utils.core_transformer_config_from_args(args)
            if with_tokenizer:
                build_tokenizer(args)
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines()  # also of tokenizers and of the network
        reason = lines[0] if lines else traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigurationError(f"Megatron refuses the arguments: {reason}") from None
