"""``megatron-fssdp doctor``: checks whether a training can run on this machine, and says what to do if not.

Without the option ``--config``, the command imports only modules that an older Python can also read.
Therefore it can report that the Python version is too old.
"""

import json
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_fssdp import __version__
from megatron_fssdp.cli.shared_options import Paths, plain_console, run_files

if TYPE_CHECKING:
    from megatron_fssdp.cli.doctor.devices import Finding

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor_command(
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints. Checks if it is writable and has space.", metavar="DIR"),
    ] = None,
    config: Annotated[
        Paths, run_files("a run. Checks if its ranks and checkpoints fit.", metavar="CONFIG.yaml")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    for_issue: Annotated[
        bool, typer.Option("--issue", help="Print a block to paste into an issue, with torch's own report.")
    ] = False,
) -> None:
    """Check whether a training can run on this machine, and say what to do if it cannot."""
    run, folders = None, [("--checkpoints", checkpoints)] if checkpoints is not None else []
    if config:
        from megatron_fssdp.launch.train_request import TrainRequest

        request = TrainRequest(config)
        run = request.resolve()
        if run.training.save_checkpoints:
            folders.append(("training.save", run.training.save or request.folder.checkpoints))
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # under torchrun, one rank of each machine reports
    from megatron_fssdp.cli.doctor import examination

    with plain_console(stderr=True).status("importing torch and Megatron"):
        findings = examination.examine_machine(run, folders)
    problems = [finding for finding in findings if finding.verdict == "problem"]
    if for_issue:
        print(_issue_block(findings, examination.torch_report()))
    elif as_json:
        named = {"plugin": __version__, "host": socket.gethostname(), "ok": not problems}
        report = {**named, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _print_report(findings, len(problems), "this run" if run is not None else "a training")
    raise typer.Exit(1 if problems else 0)


def _issue_block(findings: "Sequence[Finding]", torch_report: str) -> str:
    """Return Markdown with one line for each finding, and torch's own report folded below."""
    lines = [f"megatron-fssdp {__version__}, {platform.platform()}"]
    lines += [f"{finding.verdict:<8}{finding.name}: {finding.found}" for finding in findings]
    folded = f"<details><summary>torch.utils.collect_env</summary>\n\n```\n{torch_report}\n```\n</details>"
    return "\n".join(["```", *lines, "```", folded])


def _print_report(findings: "Sequence[Finding]", num_problems: int, subject: str) -> None:
    """Print a table, the next steps, and then what can run or the number of problems."""
    from rich.table import Column, Table
    from rich.text import Text

    console, found_column = plain_console(), Column("found", overflow="fold")
    title = Text(f"megatron-fssdp {__version__} on {socket.gethostname()}")
    table = Table("check", found_column, Column("verdict", no_wrap=True), title=title, title_justify="left")
    for finding in findings:
        table.add_row(
            Text(finding.name), Text(finding.found), Text(finding.verdict, style=_STYLES[finding.verdict])
        )
    console.print(table)
    for finding in sorted(findings, key=lambda finding: finding.verdict == "problem"):
        if finding.advice:
            line = Text.assemble(
                (finding.verdict, _STYLES[finding.verdict]), f": {finding.name}: {finding.advice}"
            )
            console.print(line)
    hint = "to report a problem of the project, paste the output of megatron-fssdp doctor --issue"
    console.print(hint)
    ending = f"OK: {len(findings)} checks found no problem; {subject} can run on this machine"
    if num_problems:
        ending = f"problems: {num_problems}; follow the advice above, then run the command again"
    style = _STYLES["problem" if num_problems else "ok"]
    console.print(ending, style=style)
