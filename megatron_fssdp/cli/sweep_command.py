"""``megatron-fssdp sweep``: strategies × settings × seeds from one YAML, and one page that compares them."""

from pathlib import Path
from typing import Annotated

import typer


def sweep_command(
    sweep: Annotated[Path, typer.Argument(help="YAML file of the sweep.", metavar="SWEEP.yaml")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of all runs and of the page. Default: in runs/, named after the file."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print state and command of every run, and start nothing."),
    ] = False,
) -> None:
    """Train strategies × settings × seeds from one YAML, and compare them on one page with their spread.

    The same command continues an interrupted sweep: finished runs are not run again.
    """
    from rich.console import Console

    from megatron_fssdp.cli.sweep_runs import Sweep

    prepared = Sweep(sweep, out or Path("runs") / sweep.stem, Console(markup=False))
    if dry_run:
        print(prepared.listing())
        return
    raise typer.Exit(prepared.run())
