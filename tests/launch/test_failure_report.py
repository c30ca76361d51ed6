from pathlib import Path

import pytest

from megatron_fssdp.launch.failure_report import failure_reason

SUMMARY = """\
Traceback (most recent call last):
  File "torch/distributed/run.py", line 900, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
pretrain_gpt.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 10)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2030-01-01_00:00:00
  host      : somewhere
  rank      : 5 (local_rank: 1)
  exitcode  : {code} (pid: 11)
  traceback : To enable traceback see: https://pytorch.org
============================================================
"""

TRACEBACKS = """\
[default0]:iteration 1
[default0]:Traceback (most recent call last):
[default1]:[rank1]: Traceback (most recent call last):
[default0]:  File "x.py", line 1, in <module>
[default1]:[rank1]:   File "x.py", line 2, in <module>
[default0]:RuntimeError: Connection closed by peer
[default1]:[rank1]: ValueError: the real reason
[default1]:[rank1]: some words after it
"""


@pytest.fixture
def reason(tmp_path):
    def find(text: str, start: int = 0) -> str:
        log: Path = tmp_path / "log.txt"
        log.write_text(text)
        return failure_reason(log, start)

    return find


def test_the_report_shows_the_exception_of_the_rank_that_failed_first(reason):
    assert reason(TRACEBACKS + SUMMARY.format(code=1)) == "rank 1: ValueError: the real reason"


def test_without_torchruns_summary_the_first_traceback_is_shown(reason):
    assert reason(TRACEBACKS) == "rank 0: RuntimeError: Connection closed by peer"


def test_the_plugins_own_error_line_comes_first(reason):
    text = "[default0]:[fssdp] error: slots: got -1\n" + TRACEBACKS
    assert reason(text) == "slots: got -1"
    assert reason("[default2]:[fssdp] error on rank 2: too few slots\n") == "too few slots"


def test_ranks_that_exit_without_an_exception_are_reported(reason):
    usage = "[default1]:usage: script\n[default1]:script: error: unrecognized arguments: --x\n"
    assert reason(usage + SUMMARY.format(code=2)) == "rank 1: script: error: unrecognized arguments: --x"
    assert reason(SUMMARY.format(code=3)) == "rank 1: exit code 3"
    killed = reason("[default1]:iteration 7\n" + SUMMARY.format(code=-9))
    assert killed == "rank 1: killed by SIGKILL; last output: iteration 7"


def test_output_of_earlier_starts_is_ignored(reason):
    earlier = "[default0]:[fssdp] error: old\n"
    assert reason(earlier + "torchrun: no such module\n", len(earlier)) == "torchrun: no such module"
    assert reason("") == "the ranks wrote nothing"
