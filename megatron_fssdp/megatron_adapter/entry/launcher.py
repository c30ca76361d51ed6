"""Runs an unmodified Megatron training script with the plugin registered."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.entry.error_report import EXIT_BAD_INPUT, report

USAGE = "usage: torchrun … -m megatron_fssdp SCRIPT.py ARGS… [--moe-strategy NAME]"


def launch(arguments: Sequence[str]) -> None:
    """Register the plugin, then run a script as ``python SCRIPT.py ARGS…`` would.

    Args:
        arguments: The script's path and its arguments.

    Raises:
        SystemExit: With code 2 after one clear line when the input is bad.
    """
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            raise ConfigurationError(f"{USAGE}; for a script's own help: -m megatron_fssdp SCRIPT.py --help")
        script = Path(arguments[0])
        if not script.is_file():
            raise ConfigurationError(
                f"script: got {script}, which is no file, wanted a training script such as "
                f"pretrain_gpt.py; {USAGE}"
            )
        # As the interpreter does for a script: its folder first, its own arguments.
        sys.path.insert(0, str(script.resolve().parent))
        sys.argv = [str(script), *arguments[1:]]

        from megatron_fssdp.megatron_adapter.entry.registration import register

        register(by_launcher=True)
        runpy.run_path(str(script), run_name="__main__")
    except ConfigurationError as error:
        report(error)
        sys.exit(EXIT_BAD_INPUT)
