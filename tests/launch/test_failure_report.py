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


OWN_ERROR = "[default2]:[fssdp] error on rank 2: too few slots\n"
USAGE = "[default1]:usage: script\n[default1]:script: error: unrecognized arguments: --x\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TRACEBACKS + SUMMARY.format(code=1), "rank 1: ValueError: the real reason"),
        (TRACEBACKS, "rank 0: RuntimeError: Connection closed by peer"),
        (OWN_ERROR + TRACEBACKS, "too few slots"),
        (USAGE + SUMMARY.format(code=2), "rank 1: script: error: unrecognized arguments: --x"),
        (SUMMARY.format(code=3), "rank 1: exit code 3"),
        ("[default1]:it 7\n" + SUMMARY.format(code=-9), "rank 1: killed by SIGKILL; last output: it 7"),
        ("[default1]:    x = write()\n[default1]:[rank1]:     ^^~~^^\n", "rank 1: x = write()"),
        ("torchrun: no such module\n", "torchrun: no such module"),
        ("", "the ranks wrote nothing"),
    ],
)
def test_the_line_that_explains_the_failure_is_found_after_earlier_starts(tmp_path, text, reason):
    log, earlier = tmp_path / "log.txt", "[default0]:[fssdp] error: old\n"
    log.write_text(earlier + text)
    assert failure_reason(log, len(earlier)) == reason
