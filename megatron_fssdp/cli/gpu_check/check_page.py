"""Writes the page and the zip of a check."""

import traceback
import zipfile
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from megatron_fssdp.cli.gpu_check.check_outcome import CheckOutcome
from megatron_fssdp.cli.gpu_check.check_sections import check_sections
from megatron_fssdp.cli.gpu_check.check_steps import DOCTOR, HOST_WORK
from megatron_fssdp.cli.gpu_check.step import StepVerdict
from megatron_fssdp.cli.gpu_check.step_runner import log_end
from megatron_fssdp.config.written_files import written_whole

_OUTPUTS = {
    HOST_WORK: (
        "Work of the host",
        "Counts are from virtual devices and do not depend on the machine. Times are those of this machine's "
        "CPU, under the load that it had.",
    ),
    DOCTOR: ("Doctor", "The report of megatron-fssdp doctor."),
}
"""Steps whose output the page shows, with title and lead of these sections."""

PAGE, SUMMARY, ZIP = "gpu_check.html", "gpu_check.json", "gpu_check.zip"


def page_html(outcome: CheckOutcome) -> str:
    """Return the page as HTML text that needs no other file and no network.

    Args:
        outcome: Everything that the check found.
    """
    environment = Environment(
        loader=PackageLoader("megatron_fssdp.cli.gpu_check", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("check_page.html.j2").render(
        outcome=outcome,
        sections=check_sections(outcome),
        failed=[result for result in outcome.results if result.verdict is StepVerdict.FAILED],
        outputs=[(name, *texts, _output(outcome, name)) for name, texts in _OUTPUTS.items()],
        zip_name=ZIP,
        style=Markup(files("megatron_fssdp.report").joinpath("page.css").read_text(encoding="utf-8")),
    )


def _output(outcome: CheckOutcome, name: str) -> str:
    """Return the output of a step, or the reason why it has none."""
    result = outcome.result_of(name)
    if result is None or result.log is None:
        return f"The step {name} was not run{f': {result.reason}' if result is not None else ''}."
    return log_end(result.log)


def write_files(outcome: CheckOutcome) -> Path:
    """Write the page, the summary and the zip into the output folder; return the zip.

    Args:
        outcome: Everything that the check found.

    Raises:
        ConfigurationError: A file cannot be written.
    """
    out = outcome.plan.out
    with written_whole(out, "--out") as partial:
        try:
            html = page_html(outcome)
        except Exception:  # A damaged result must not cost the logs and the numbers of a long check.
            error = escape(traceback.format_exc())
            text = "This page could not be made; the zip is complete."
            html = f"<h1>{outcome.verdict}</h1><p>{text}</p><pre>{error}</pre>"
        (partial / PAGE).write_text(html, encoding="utf-8")
        (partial / SUMMARY).write_text(outcome.summary_json(), encoding="utf-8")
        with zipfile.ZipFile(partial / ZIP, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in (PAGE, SUMMARY):
                archive.write(partial / name, name)
            for folder in (outcome.plan.logs, outcome.plan.results):
                for path in sorted(folder.rglob("*")):
                    if path.is_file():
                        archive.write(path, path.relative_to(out))
    return out / ZIP
