"""``megatron-fssdp doctor``: checks whether a training can run on this machine, and says what to do if not.

Without the option ``--config``, the command imports only modules that an older Python can also read.
Therefore it can report that the Python version is too old.
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_fssdp import __version__
from megatron_fssdp.megatron_adapter.diagnosis.examination import examine_machine
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict

if TYPE_CHECKING:
    from megatron_fssdp.config.run.run_config import RunConfig

EXIT_PROBLEM = 1

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


@dataclass(frozen=True)
class DoctorRequest:
    """Options of ``megatron-fssdp doctor``.

    Attributes:
        config_paths: YAML files of a run to check on this machine. Empty to check only the machine.
        checkpoints: Folder for checkpoints to check, or None.
        as_json: Whether to print the report as JSON.
    """

    config_paths: Sequence[Path] = ()
    checkpoints: Path | None = None
    as_json: bool = False

    def resolve(self) -> "tuple[RunConfig | None, list[tuple[str, Path]]]":
        """Return the run's settings (or None) and the checkpoint folders to check.

        Each folder comes with the option or setting that names it.

        Raises:
            ConfigurationError: The run's YAML is invalid.
        """
        folders = [("--checkpoints", self.checkpoints)] if self.checkpoints is not None else []
        if not self.config_paths:
            return None, folders
        from megatron_fssdp.cli.training.train_request import TrainRequest

        request = TrainRequest(self.config_paths)
        run = request.resolve()
        if run.training.save_checkpoints:
            default = request.folder.checkpoints
            folders.append(("training.save", run.training.save or default))
        return run, folders


def examine(request: DoctorRequest) -> int:
    """Examine this machine and print the report. Under torchrun, one rank of each machine does this.

    Returns:
        The exit code: 0 if a training can run, 1 if there are problems.

    Raises:
        ConfigurationError: The run's YAML is invalid. Nothing was examined.
    """
    run, folders = request.resolve()
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0
    with Console(stderr=True).status("importing torch and Megatron"):
        findings = examine_machine(run, folders)
    host = socket.gethostname()
    if request.as_json:
        print(report_json(findings, host))
    else:
        print_report(findings, host, Console(markup=False), "this run" if run is not None else "a training")
    return EXIT_PROBLEM if _problems(findings) else 0


def report_json(findings: Sequence[Finding], host: str) -> str:
    """Return the report as JSON text.

    Args:
        findings: Findings in the order of the report.
        host: Host name of the machine.
    """
    report = {
        "plugin": __version__,
        "host": host,
        "ok": not _problems(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=2, ensure_ascii=False)


def print_report(
    findings: Sequence[Finding], host: str, console: Console, subject: str = "a training"
) -> None:
    """Print the report: a table, the next steps, and then what can run or the number of problems.

    Args:
        findings: Findings in the order of the report.
        host: Host name of the machine.
        console: Console that prints the report.
        subject: What can run on this machine if there is no problem.
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
        noun = "problem" if count == 1 else "problems"
        ending = f"{count} {noun}: follow the advice above, then run the command again"
        console.print(ending, style=_STYLES[Verdict.PROBLEM], highlight=False, soft_wrap=True)
    else:
        ending = f"OK: {len(findings)} checks found no problem; {subject} can run on this machine"
        console.print(ending, style=_STYLES[Verdict.OK], highlight=False, soft_wrap=True)


def _problems(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is Verdict.PROBLEM]
