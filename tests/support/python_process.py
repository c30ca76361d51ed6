"""Python programs that tests run in processes of their own."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


def run_python(*words, cwd=None, **variables):
    """Run ``python WORDS…`` with these environment variables beside those of this process."""
    options = {"cwd": cwd, "env": {**os.environ, **variables}}
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **options)


def python_output(*words, **options):
    """Require that ``python WORDS…`` succeeds, and return what it prints to its standard output."""
    done = run_python(*words, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def is_running(pid):
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False
