"""The command line ``megatron-fssdp``: the table of its commands, and what ends it.

Heavy packages are imported inside the commands, so that ``--help`` answers quickly.
"""

import os
import sys
from typing import Annotated, Any

import typer

from megatron_fssdp import __version__
from megatron_fssdp.cli.declarations.analysis_commands import (
    compare_command,
    report_command,
    roofline_command,
    simulate_command,
)
from megatron_fssdp.cli.declarations.command_classes import NamingCommand, PassingCommand
from megatron_fssdp.cli.declarations.machine_commands import doctor_command, profile_command
from megatron_fssdp.cli.declarations.training_commands import data_build_command, sweep_command, train_command
from megatron_fssdp.config.errors import ConfigurationError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_UsageError: Any = typer.BadParameter.__base__
"""Exception that typer raises for a wrong command line. typer does not export it under a name."""

app = typer.Typer(
    name="megatron-fssdp",
    help="Train Mixture-of-Experts models on stock Megatron-LM with balanced load.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Build training data.", no_args_is_help=True)
app.add_typer(data_app, name="data")


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


# The order is that of --help.
app.command("train", cls=PassingCommand, options_metavar="[OPTIONS] [-- MEGATRON ARGUMENTS]")(train_command)
app.command("sweep", options_metavar="[OPTIONS]")(sweep_command)
app.command("profile")(profile_command)
app.command("doctor")(doctor_command)
data_app.command("build")(data_build_command)
app.command("report", cls=NamingCommand)(report_command)
app.command("compare", cls=NamingCommand)(compare_command)
app.command("simulate", cls=NamingCommand)(simulate_command)
app.command("roofline")(roofline_command)


@app.command("configs")
def configs_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files or names to combine and print as one YAML. Later ones win.",
            metavar="[CONFIG.yaml...]",
        ),
    ] = None,
) -> None:
    """List the runs and clusters that come with the package, or print one of them as YAML."""
    from megatron_fssdp.cli.configs_command import composed_yaml, shipped_names

    sys.stdout.write(composed_yaml(names) if names else shipped_names())


@app.command("schema")
def schema_command(
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Print the schema of a sweep's YAML instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of a run's YAML, or of a sweep's."""
    from megatron_fssdp.config.run.json_schema import run_config_schema_text
    from megatron_fssdp.config.sweep.json_schema import sweep_schema_text

    sys.stdout.write(sweep_schema_text() if sweep else run_config_schema_text())


@app.command("version")
def version_command() -> None:
    """Show the version and exit."""
    _show_version(True)


def main() -> None:
    """Entry point of the console script."""
    try:
        code = app(standalone_mode=False)
    except ConfigurationError as error:
        _say(str(error))
        sys.exit(EXIT_BAD_INPUT)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "megatron-fssdp"
        message = error.format_message()
        if len(message.splitlines()) == 1:
            _say(f"{message.rstrip('.')}; see {command} --help")
        else:
            error.show()  # without arguments, the message is the help text
        sys.exit(EXIT_BAD_INPUT)
    except typer.Abort:
        _say("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        from megatron_fssdp.megatron_adapter.support.broken_packages import broken_package

        broken = broken_package(error)
        if broken is None:
            raise
        _say(broken.message())
        sys.exit(EXIT_BAD_INPUT)
    sys.exit(code)


def _say(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # under torchrun, only one of the ranks prints
        print(f"error: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
