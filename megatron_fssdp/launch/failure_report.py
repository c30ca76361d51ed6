"""Finds the line of a log that explains why a run failed."""

import re
import signal
from contextlib import suppress
from pathlib import Path

# The message that this package's launcher prints for invalid input.
_PLUGIN_ERROR = re.compile(r"\[fssdp\] error(?: on rank \d+)?: (?P<message>.*)")
# torchrun's summary of the rank that failed first.
_ROOT_CAUSE = re.compile(
    r"Root Cause.*?rank\s*:\s*\d+ \(local_rank: (?P<rank>\d+)\)\s+exitcode\s*:\s*(?P<code>-?\d+)", re.DOTALL
)
# The last line of a traceback: an exception's name at the start of a line.
_EXCEPTION = re.compile(r"^(?P<name>(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)?)(?:: |$)")
# torchrun's own lines have no mark. They only state that a rank failed.
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
    if found := _PLUGIN_ERROR.search(text):
        return found["message"].strip()
    # The last line of each rank, and that of its last traceback, in the order of the first tracebacks.
    last_lines: dict[str, str] = {}
    reasons: dict[str, str] = {}
    in_traceback: set[str] = set()
    for line in text.splitlines():
        if not (mark := _RANK_MARK.match(line)) or not (content := line[mark.end() :]).strip(" ^~"):
            continue  # an empty line, or one that marks a place in the line above
        last_lines[mark["rank"]] = content.strip()
        if content.startswith("Traceback (most recent call last)"):
            in_traceback.add(mark["rank"])
        elif mark["rank"] in in_traceback and _EXCEPTION.match(content):
            in_traceback.remove(mark["rank"])
            reasons[mark["rank"]] = content.strip()
    if root := _ROOT_CAUSE.search(text):
        rank, code = root["rank"], int(root["code"])
        if code < 0:
            name = f"signal {-code}"
            with suppress(ValueError):
                name = signal.Signals(-code).name
            return f"rank {rank}: killed by {name}; last output: {last_lines.get(rank, 'none')}"
        return f"rank {rank}: {reasons.get(rank) or last_lines.get(rank) or f'exit code {code}'}"
    for rank, reason in (reasons or last_lines).items():
        return f"rank {rank}: {reason}"
    meaningful = [line.strip() for line in text.splitlines() if line.strip(" =-\t")]
    return meaningful[-1] if meaningful else "the ranks wrote nothing"
