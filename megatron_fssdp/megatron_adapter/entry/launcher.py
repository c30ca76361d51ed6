"""Runs an unmodified training script of any host with the plugin. Bad input gives one line."""

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.entry.bad_input import EXIT_BAD_INPUT, report
from megatron_fssdp.megatron_adapter.support.capabilities import naming_missing_seams

USAGE = "usage: torchrun … -m megatron_fssdp SCRIPT.py|-m MODULE ARGS… [--moe-strategy NAME]"


def launch(arguments: Sequence[str]) -> None:
    """Turn the plugin on, and run a script or a module, like ``python SCRIPT.py ARGS…`` or ``-m MODULE``.

    The script is a path, or the name of one that comes with the package. A script of Megatron-LM gets the
    plugin's arguments. Elsewhere the strategy is that of ``--moe-strategy`` among the arguments, which the
    script must ignore, or of the environment. Invalid input ends the process by one line and exit code 2.
    """
    try:
        run = _program(list(arguments))
        with naming_missing_seams():
            _turn_on(arguments)
        run()
    except ConfigurationError as error:
        report(error)
        sys.exit(EXIT_BAD_INPUT)


def _turn_on(arguments: Sequence[str]) -> None:
    """Attach the strategy that arguments or the environment ask for, before the program begins.

    If it is one of Megatron-LM's, it parses the same arguments again, with more checks, and attaches anew.
    """
    if find_spec("megatron.training") is not None:
        from megatron_fssdp.megatron_adapter.entry.registration import register

        register(by_launcher=True)
    # These import Megatron.
    from megatron_fssdp.config.strategy.strategy_registry import resolve_strategy
    from megatron_fssdp.megatron_adapter.entry.attach import add_strategy_options, use
    from megatron_fssdp.megatron_adapter.iterations.attachment import Attachment

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_strategy_options(parser)
    asked, _ = parser.parse_known_args(list(arguments))
    settings = resolve_strategy(asked.moe_strategy, asked.moe_strategy_config, asked.moe_strategy_set)
    if not (attachment := Attachment(asked.moe_strategy, settings)).does_nothing:
        use(attachment)


def _program(arguments: list[str]) -> Callable[[], object]:
    """Set ``sys.argv`` as Python does, and return what runs the script or module."""
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        return partial(runpy.run_module, arguments[1], run_name="__main__", alter_sys=True)
    if not arguments or arguments[0] == "-m":
        raise ConfigurationError(f"{USAGE}; the script's own help: -m megatron_fssdp SCRIPT.py --help")
    script = shipped_scripts().get(arguments[0], Path(arguments[0]))
    if not script.is_file():
        raise ConfigurationError(
            f"script: got {script}, which is not a file, wanted a training script such as "
            f"pretrain_gpt.py, or the name of one in the package ({', '.join(shipped_scripts())}); "
            f"{USAGE}; for commands such as simulate: megatron-fssdp simulate --help"
        )
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *arguments[1:]]
    return partial(runpy.run_path, str(script), run_name="__main__")


def shipped_scripts() -> dict[str, Path]:
    """Return the package's training scripts by name, which is the same on every machine."""
    package = Path(__file__).parents[2]
    return {path.stem: path for path in sorted(package.glob("pretraining/pretrain_*.py"))}
