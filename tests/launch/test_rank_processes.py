import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fssdp.launch import rank_processes
from megatron_fssdp.launch.rank_processes import exit_code_after, run_to_the_end


def run(code: str, log: Path, on_poll: Callable[[], object]) -> int:
    with log.open("ab") as output:
        return run_to_the_end([sys.executable, "-c", code], {"SAID": "hello"}, output, on_poll)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


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
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_rank(tmp_path, monkeypatch, number):
    monkeypatch.setattr(rank_processes, "_END_GRACE_S", 0.3)
    log = tmp_path / "log.txt"

    def interrupt_once_started() -> None:
        if log.read_text().strip():
            os.kill(os.getpid(), number)
            time.sleep(1)  # the interrupt arrives during this call at the latest

    with pytest.raises(KeyboardInterrupt) as interrupt:
        run(STUBBORN, log, interrupt_once_started)
    assert exit_code_after(interrupt.value) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    rank = int(log.read_text())
    deadline = time.monotonic() + 5
    while is_running(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(rank)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells children of their parent's end")
def test_ranks_end_when_the_command_is_killed(tmp_path):
    log = tmp_path / "log.txt"
    program = (
        "import sys; from megatron_fssdp.launch.rank_processes import run_to_the_end\n"
        "rank = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        f"run_to_the_end([sys.executable, '-c', rank], {{}}, open({str(log)!r}, 'ab'))\n"
    )
    command = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 20
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    command.kill()
    command.wait()
    rank = int(log.read_text())
    while is_running(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(rank)
