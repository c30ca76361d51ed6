"""``megatron-fssdp doctor``: whether a training can run on this machine, and what to do if not.

Without a run's file nothing is imported that a Python older than the wanted one could not read,
so that the report can say so.
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_fssdp import __version__
from megatron_fssdp.megatron_adapter.diagnosis.examination import diagnose, gather_facts
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict

if TYPE_CHECKING:
    from megatron_fssdp.config.run_config import RunConfig

EXIT_PROBLEM = 1

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


@dataclass(frozen=True)
class DoctorRequest:
    """What the command line asks for.

    Attributes:
        config_paths: YAML of a run that is wanted on this machine, or parts of it.
        checkpoints: Folder that checkpoints are to go to.
        as_json: Whether a machine reads the report.
    """

    config_paths: Sequence[Path] = ()
    checkpoints: Path | None = None
    as_json: bool = False

    def resolve(self) -> "tuple[RunConfig | None, list[tuple[str, Path]]]":
        """The run of the file, and the checkpoint folders to try by the settings that name them.

        Raises:
            ConfigurationError: The file is wrong.
        """
        folders = [("--checkpoints", self.checkpoints)] if self.checkpoints is not None else []
        if not self.config_paths:
            return None, folders
        from megatron_fssdp.cli.run_folder import RunFolder
        from megatron_fssdp.cli.train_command import TrainRequest

        request = TrainRequest(self.config_paths)
        run = request.resolve()
        if run.training.save_checkpoints:
            default = RunFolder(request.out_dir(run)).checkpoints
            folders.append(("training.checkpoint_dir", run.training.checkpoint_dir or default))
        return run, folders


def examine(request: DoctorRequest) -> int:
    """Look at this machine and report.

    Under torchrun one rank of each machine does it.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: The run's file is wrong; nothing was looked at.
    """
    run, folders = request.resolve()
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0
    with Console(stderr=True).status("importing torch and Megatron"):
        facts = gather_facts(folders)
    findings = diagnose(facts, run)
    host = socket.gethostname()
    if request.as_json:
        print(report_json(findings, host))
    else:
        print_report(findings, host, Console(markup=False))
    return EXIT_PROBLEM if _problems(findings) else 0


def report_json(findings: Sequence[Finding], host: str) -> str:
    """The report for machines.

    Args:
        findings: In the order of the report.
        host: Name of the machine.
    """
    report = {
        "plugin": __version__,
        "host": host,
        "ok": not _problems(findings),
        "findings": [
            {
                "name": finding.name,
                "found": finding.found,
                "verdict": finding.verdict.value,
                "advice": finding.advice,
            }
            for finding in findings
        ],
    }
    return json.dumps(report, indent=2, ensure_ascii=False)


def print_report(findings: Sequence[Finding], host: str, console: Console) -> None:
    """A table, the next steps, and OK or how many there are.

    Args:
        findings: In the order of the report.
        host: Name of the machine.
        console: Where to print.
    """
    table = Table(title=Text(f"megatron-fssdp {__version__} on {host}"), title_justify="left")
    table.add_column("check")
    table.add_column("found", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for finding in findings:
        verdict = Text(finding.verdict.value, style=_STYLES[finding.verdict])
        table.add_row(Text(finding.name), Text(finding.found), verdict)
    console.print(table)
    for finding in sorted(findings, key=lambda each: each.verdict is Verdict.PROBLEM):
        if finding.advice:
            line = Text.assemble(
                (finding.verdict.value, _STYLES[finding.verdict]), f": {finding.name}: {finding.advice}"
            )
            console.print(line, soft_wrap=True)
    count = len(_problems(findings))
    if count:
        ending = f"{count} {'problem' if count == 1 else 'problems'}: do what is said above, then ask again"
        console.print(ending, style=_STYLES[Verdict.PROBLEM], highlight=False, soft_wrap=True)
    else:
        console.print("OK", style=_STYLES[Verdict.OK])


def _problems(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is Verdict.PROBLEM]
