"""Finds the line of a log that says why a run failed."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

# Our launcher's own words, for bad input.
_PLUGIN_ERROR = re.compile(r"\[fssdp\] error(?: on rank \d+)?: (?P<message>.*)")
# torchrun's summary of the rank that failed first.
_ROOT_CAUSE = re.compile(
    r"Root Cause.*?rank\s*:\s*\d+ \(local_rank: (?P<rank>\d+)\)\s+exitcode\s*:\s*(?P<code>-?\d+)", re.DOTALL
)
# The last line of a traceback: an exception's name at the start of a line.
_EXCEPTION = re.compile(r"^(?P<name>(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)?)(?:: |$)")
_RANK_MARK = re.compile(r"^\[[a-z_]+(?P<rank>\d+)\]:\s?(?:\[rank\d+\]:\s?)?")
_MAX_LOG_BYTES = 4 << 20


def failure_reason(log: Path, start: int = 0) -> str:
    """Say why the ranks failed.

    Args:
        log: Output of all ranks.
        start: Where in the file this start of the run begins, in bytes.

    Returns:
        One line: the plugin's message, or the exception of the rank that failed first, or the last line.
    """
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - _MAX_LOG_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    lines = text.splitlines()
    for line in lines:
        if match := _PLUGIN_ERROR.search(line):
            return match["message"].strip()
    reasons = _exceptions_by_rank(lines)
    last_lines = _last_lines_by_rank(lines)
    if root := _ROOT_CAUSE.search(text):
        rank, code = root["rank"], int(root["code"])
        if code < 0:
            return f"rank {rank}: ended by {_signal_name(-code)}; last output: {last_lines.get(rank, 'none')}"
        reasons = {rank: reasons.get(rank) or last_lines.get(rank) or f"exit code {code}"}
    for rank, reason in (reasons or last_lines).items():
        return f"rank {rank}: {reason}"
    meaningful = [line.strip() for line in lines if line.strip(" =-\t")]
    return meaningful[-1] if meaningful else "the ranks wrote nothing"


def _exceptions_by_rank(lines: list[str]) -> dict[str, str]:
    """Last line of each rank's last traceback; ranks in order of their first one."""
    in_traceback: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    for rank, content in _marked(lines):
        if content.startswith("Traceback (most recent call last)"):
            in_traceback[rank] = True
        elif in_traceback.get(rank) and _EXCEPTION.match(content):
            in_traceback[rank] = False
            reasons[rank] = content.strip()
    return reasons


def _last_lines_by_rank(lines: list[str]) -> dict[str, str]:
    return {rank: content.strip() for rank, content in _marked(lines) if content.strip()}


def _marked(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Ranks' lines without their marks; torchrun's own lines only say that a rank failed."""
    for line in lines:
        if mark := _RANK_MARK.match(line):
            yield mark["rank"], line[mark.end() :]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
