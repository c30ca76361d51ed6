import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_fssdp.launch import rank_processes
from megatron_fssdp.launch.rank_processes import exit_code_after, failure_reason, run_to_the_end
from tests.support.python_process import is_running


def run(code, log, on_poll):
    with log.open("ab") as output:
        return run_to_the_end([sys.executable, "-c", code], {"SAID": "hello"}, output, on_poll)


def wait_until(is_so):
    while not is_so():  # or pytest's time limit ends the test
        time.sleep(0.05)


def test_output_is_appended_to_the_log_and_the_exit_code_is_returned(tmp_path):
    log, polls = tmp_path / "log.txt", []
    log.write_text("before\n")
    code = "import os, sys; print(os.environ['SAID']); print('bad', file=sys.stderr); sys.exit(3)"
    assert run(code, log, lambda: polls.append(1)) == 3
    assert sorted(log.read_text().splitlines()) == ["bad", "before", "hello"]
    assert polls


# A stand-in for torchrun with a rank that ignores SIGTERM.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"])
print(child.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_rank(tmp_path, monkeypatch, number):
    monkeypatch.setattr(rank_processes, "_END_GRACE_S", 0.3)
    log = tmp_path / "log.txt"

    def interrupt_once_started():
        if log.read_text().strip():
            os.kill(os.getpid(), number)
            time.sleep(1)  # the interrupt arrives during this call at the latest

    with pytest.raises(KeyboardInterrupt) as interrupt:
        run(STUBBORN, log, interrupt_once_started)
    assert exit_code_after(interrupt.value) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    wait_until(lambda: not is_running(int(log.read_text())))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells children of their parent's end")
def test_ranks_end_when_the_command_is_killed(tmp_path):
    log = tmp_path / "log.txt"
    program = (
        "import sys; from megatron_fssdp.launch.rank_processes import run_to_the_end\n"
        "rank = 'import os, time; print(os.getpid(), flush=True); time.sleep(3600)'\n"
        f"run_to_the_end([sys.executable, '-c', rank], {{}}, open({str(log)!r}, 'ab'))\n"
    )
    command = subprocess.Popen([sys.executable, "-c", program])
    wait_until(lambda: log.exists() and log.read_text().strip())
    command.kill()
    command.wait()
    wait_until(lambda: not is_running(int(log.read_text())))


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
