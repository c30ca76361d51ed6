"""Writes time spans as a Chrome trace, which Perfetto and Chrome's tracing page can show."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fssdp.config.written_files import written_file


@dataclass(frozen=True)
class TraceSpan:
    """A time span in which one rank did something.

    Attributes:
        rank: Number of the rank. Viewers show it as a process.
        lane: Name of the lane. Viewers show it as a row of the process. Two spans of one lane can be nested,
            but must not overlap partly.
        name: Name of the work that was done.
        begin_s: Begin of the span, in seconds on a clock that all ranks share.
        end_s: End of the span, in seconds on the same clock.
    """

    rank: int
    lane: str
    name: str
    begin_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not self.begin_s <= self.end_s:
            raise ValueError(
                f"span {self.name} of rank {self.rank}: got the end {self.end_s} s, wanted an end at or "
                f"after the begin {self.begin_s} s"
            )


def chrome_trace(spans: Sequence[TraceSpan]) -> dict[str, Any]:
    """Return the JSON object of a trace. Its times are microseconds since the begin of the first span."""
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
    """Write spans, in any order, to a file as a Chrome trace."""
    path = Path(path)
    with written_file(path, "trace") as partial:
        partial.write_text(json.dumps(chrome_trace(spans)) + "\n", encoding="utf-8")
