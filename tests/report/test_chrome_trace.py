import json

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.report.chrome_trace import TraceSpan, chrome_trace, write_chrome_trace

SPANS = [
    TraceSpan(1, "compute", "layer 1 forward", 10.5, 11.0),
    TraceSpan(0, "transfers", "spAG layer 1", 10.25, 10.5),
    TraceSpan(0, "compute", "iteration", 10.25, 12.0),
]


def test_spans_become_rows_of_their_ranks(tmp_path):
    write_chrome_trace(tmp_path / "trace.json", SPANS)
    trace = json.loads((tmp_path / "trace.json").read_text())
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert rows == {(rank, row): name for rank in (0, 1) for row, name in enumerate(("compute", "transfers"))}
    ranks = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert ranks == ["rank 0", "rank 1"]
    found = [
        (event["name"], event["pid"], rows[event["pid"], event["tid"]], event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]
    # Spans are ordered by begin, the longer one first, because a viewer nests the second in the first.
    assert found == [
        ("iteration", 0, "compute", 0, 1_750_000),
        ("spAG layer 1", 0, "transfers", 0, 250_000),
        ("layer 1 forward", 1, "compute", 250_000, 500_000),
    ]


def test_a_trace_without_spans_is_valid():
    assert chrome_trace([])["traceEvents"] == []


def test_bad_spans_and_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"span wait of rank 2: got the end 1\.0 s"):
        TraceSpan(2, "waits", "wait", 2.0, 1.0)
    with pytest.raises(ConfigurationError, match="is a folder, wanted a file"):
        write_chrome_trace(tmp_path, SPANS)
