"""The command line ``megatron-fssdp``: its commands in the order of ``--help``, and what ends it.

Heavy packages are imported inside the commands, so that ``--help`` answers quickly.
"""

import errno
import os
import sys
from typing import Annotated, Any

import typer

from megatron_fssdp import __version__
from megatron_fssdp.cli.analysis.commands import compare_command, report_command, simulate_command
from megatron_fssdp.cli.check_command import check_command
from megatron_fssdp.cli.configs_command import configs_command
from megatron_fssdp.cli.data_command import data_build_command
from megatron_fssdp.cli.doctor.doctor_command import doctor_command
from megatron_fssdp.cli.profile_command import profile_command
from megatron_fssdp.cli.train_command import train_command
from megatron_fssdp.config.errors import ConfigurationError

EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130

_UsageError: Any = typer.BadParameter.__base__
"""Exception that typer raises for a wrong command line. typer does not export it under a name."""

_TAKE_WORDS = ("train", "check")
"""Commands that pass the words after ``--`` on; they are the context's object."""

app = typer.Typer(name="megatron-fssdp", no_args_is_help=True, pretty_exceptions_enable=False)
data_app = typer.Typer(help="Build training data.", no_args_is_help=True)
data_app.command("build")(data_build_command)

app.command("train", options_metavar="[OPTIONS] [-- MEGATRON ARGUMENTS]")(train_command)
app.command("check", options_metavar="-- torchrun … SCRIPT.py ARGUMENTS")(check_command)
app.command("profile")(profile_command)
app.command("doctor")(doctor_command)
app.add_typer(data_app, name="data")
app.command("report")(report_command)
app.command("compare")(compare_command)
app.command("simulate")(simulate_command)
app.command("configs")(configs_command)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"megatron-fssdp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Train Mixture-of-Experts models on stock Megatron-LM with balanced load."""


def main() -> None:
    """Entry point of the console script."""
    words, passed_on = sys.argv[1:], list[str]()
    if words[:1] and words[0] in _TAKE_WORDS and "--" in words:
        end = words.index("--")
        words, passed_on = words[:end], words[end + 1 :]
    try:
        sys.exit(app(args=words, obj=passed_on, standalone_mode=False))
    except ConfigurationError as error:
        _fail(str(error))
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "megatron-fssdp"
        message = error.format_message()
        if len(message.splitlines()) == 1:
            _fail(f"{message.rstrip('.')}; see {command} --help")
        error.show()  # without arguments, the message is the help text
        sys.exit(EXIT_BAD_INPUT)
    except typer.Abort:
        _fail("interrupted", EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(f"{error.filename or 'output'}: cannot be written ({error.strerror}); free some space")
        if isinstance(error, PermissionError):
            _fail(f"{error.filename}: permission denied; let your user read it, or give another")
        raise


def _fail(message: str, code: int = EXIT_BAD_INPUT) -> None:
    if os.environ.get("RANK", "0") == "0":  # under torchrun, only one of the ranks prints
        print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
