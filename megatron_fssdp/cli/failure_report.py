"""Finds the line of a log that says why a run failed."""

import re
from pathlib import Path

# Our launcher's own words, for bad input.
_PLUGIN_ERROR = re.compile(r"\[fssdp\] error(?: on rank \d+)?: (?P<message>.*)")
# torchrun's summary of the rank that failed first.
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*\d+ \(local_rank: (?P<rank>\d+)\)", re.DOTALL)
# The last line of a traceback: an exception's name at the start of a line.
_EXCEPTION = re.compile(r"^(?P<name>(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)?)(?:: |$)")
_RANK_MARK = re.compile(r"^\[(?:default|rank)?(?P<rank>\d+)\]:\s?(?:\[rank\d+\]:\s?)?")
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
    root = _ROOT_CAUSE.search(text)
    reasons = _exceptions_by_rank(lines)
    if root and root["rank"] in reasons:
        return f"rank {root['rank']}: {reasons[root['rank']]}"
    for rank, reason in reasons.items():
        return f"rank {rank}: {reason}" if rank else reason
    meaningful = [line.strip() for line in lines if line.strip() and not set(line.strip()) <= set("=-")]
    return meaningful[-1] if meaningful else "the ranks wrote nothing"


def _exceptions_by_rank(lines: list[str]) -> dict[str, str]:
    """Last line of each rank's first traceback, ranks in order of their tracebacks' ends."""
    in_traceback: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    for line in lines:
        mark = _RANK_MARK.match(line)
        rank = mark["rank"] if mark else ""
        if not rank:  # torchrun's own traceback only says that a rank failed
            continue
        content = line[mark.end() :] if mark else line
        if content.startswith("Traceback (most recent call last)"):
            in_traceback[rank] = True
        elif in_traceback.get(rank) and _EXCEPTION.match(content):
            in_traceback[rank] = False
            reasons[rank] = content.strip()
    return reasons
