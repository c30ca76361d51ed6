"""Spans of time as a file for Chrome's tracing page, Perfetto and other viewers of that format."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fssdp.config.written_files import written_whole


@dataclass(frozen=True)
class TraceSpan:
    """Something that one rank did for a while.

    Attributes:
        rank: Shown as a process.
        lane: Shown as a row of it. Spans of one lane may lie inside each other, not across.
        name: What was done.
        begin_s: On a clock that all ranks share.
        end_s: On the same clock.
    """

    rank: int
    lane: str
    name: str
    begin_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not self.begin_s <= self.end_s:
            raise ValueError(
                f"span {self.name} of rank {self.rank}: got an end at {self.end_s} s, wanted one at or after "
                f"its begin at {self.begin_s} s"
            )


def chrome_trace(spans: Sequence[TraceSpan]) -> dict[str, Any]:
    """The JSON object of a trace: times in microseconds from the first span's begin.

    Args:
        spans: In any order; lanes are shown in the order in which they appear.
    """
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(span.lane for span in spans))}
    start_s = min((span.begin_s for span in spans), default=0.0)
    named = [
        {"ph": "M", "name": kind, "pid": rank, "tid": number, "args": {"name": name}}
        for rank in sorted({span.rank for span in spans})
        for kind, number, name in [
            ("process_name", 0, f"rank {rank}"),
            *(("thread_name", number, lane) for lane, number in lanes.items()),
        ]
    ]
    events = [
        {
            "ph": "X",
            "name": span.name,
            "pid": span.rank,
            "tid": lanes[span.lane],
            "ts": round((span.begin_s - start_s) * 1e6, 3),
            "dur": round((span.end_s - span.begin_s) * 1e6, 3),
        }
        for span in sorted(spans, key=lambda span: (span.begin_s, -span.end_s))
    ]
    return {"displayTimeUnit": "ms", "traceEvents": named + events}


def write_chrome_trace(path: Path | str, spans: Sequence[TraceSpan]) -> None:
    """Write :func:`chrome_trace` to a file.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    path = Path(path)
    with written_whole(path.parent, "trace") as partial:
        (partial / path.name).write_text(json.dumps(chrome_trace(spans)) + "\n", encoding="utf-8")
