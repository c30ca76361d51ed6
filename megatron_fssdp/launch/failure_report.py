"""Finds the line of a log that explains why a run failed."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

# The message that this package's launcher prints for invalid input.
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
    """Find the reason why the ranks of a run failed.

    ``start`` is the position in the log, in bytes, at which the output of this start of the run begins.

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
            return (
                f"rank {rank}: killed by {_signal_name(-code)}; last output: {last_lines.get(rank, 'none')}"
            )
        reasons = {rank: reasons.get(rank) or last_lines.get(rank) or f"exit code {code}"}
    for rank, reason in (reasons or last_lines).items():
        return f"rank {rank}: {reason}"
    meaningful = [line.strip() for line in lines if line.strip(" =-\t")]
    return meaningful[-1] if meaningful else "the ranks wrote nothing"


def _exceptions_by_rank(lines: list[str]) -> dict[str, str]:
    """Return the last line of each rank's last traceback. Ranks are in the order of their first traceback."""
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
    """Yield each rank's lines, without the rank's mark. torchrun's own lines are left out.

    They only state that a rank failed.
    """
    for line in lines:
        if mark := _RANK_MARK.match(line):
            yield mark["rank"], line[mark.end() :]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
