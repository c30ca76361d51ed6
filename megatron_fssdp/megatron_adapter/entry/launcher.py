"""Runs an unmodified training script of any host with the plugin. Bad input gives one line."""

import argparse
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.entry.bad_input import EXIT_BAD_INPUT, report

USAGE = "usage: torchrun … -m megatron_fssdp SCRIPT.py|-m MODULE ARGS… [--moe-strategy NAME]"


def launch(arguments: Sequence[str]) -> None:
    """Turn the plugin on, and run a script or a module, like ``python SCRIPT.py ARGS…`` or ``-m MODULE``.

    The script is a path, or the name of one that comes with the package. A script of Megatron-LM gets the
    plugin's arguments. Elsewhere the strategy is that of ``--moe-strategy`` among the arguments, which the
    script must ignore, or of the environment. Invalid input ends the process by one line and exit code 2.
    """
    show_warnings_once()
    try:
        run = _program(list(arguments))
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
    from megatron_fssdp.megatron_adapter.entry.attach import asked_by_environment, use
    from megatron_fssdp.megatron_adapter.iterations.attachment import Attachment

    name, settings = asked_by_environment()
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--moe-strategy", default=name)
    parser.add_argument("--moe-strategy-config")
    parser.add_argument("--moe-strategy-set", action="append", default=settings)
    asked, _ = parser.parse_known_args(list(arguments))
    if asked.moe_strategy not in (None, "none"):
        found = resolve_strategy(asked.moe_strategy, asked.moe_strategy_config, asked.moe_strategy_set)
        use(Attachment(asked.moe_strategy, found))


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


def show_warnings_once() -> None:
    """Leave the warnings that Megatron and torch repeat on every rank to rank 0.

    Errors of all ranks are shown, and so are warnings on numbers (RuntimeWarning) and those of other modules.
    """
    if os.environ.get("RANK", "0") == "0":
        return
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(megatron|torch)\.")
    # Processes that a rank starts, such as those that write checkpoints, import Megatron again.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
