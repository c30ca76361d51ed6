"""Runs a host's script on ranks that are forked from a process, because to import a host takes a minute."""

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MODULES = {
    "bridge": ("megatron.bridge", "megatron.bridge.training.pretrain", "tests.hosts.bridge_configuration"),
    "verl": ("megatron.bridge", "verl.workers.engine_workers", "verl.workers.engine.megatron"),
    "swift": ("mcore_bridge.model.register", "swift.megatron.trainers", "swift.megatron.pipelines"),
}
FIXED = {"MEGATRON_FSSDP_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Run:
    """Exit codes, and what all ranks have printed."""

    codes: list[int]
    log: str

    def values(self, name):
        """The values of a name in all printed lines of JSON."""
        lines = (json.loads(line) for line in self.log.splitlines() if line.startswith('{"'))
        return [line[name] for line in lines if name in line]


class Host:
    """A host, imported once; ``folder`` gets the output of its ranks."""

    def __init__(self, name, folder):
        self._script, self._folder = str(ROOT / f"tests/hosts/{name}_training.py"), folder
        self._stock = {}
        self.pipe, theirs = (context := get_context("spawn")).Pipe()
        context.Process(target=_serve, args=(name, str(folder), theirs)).start()  # It ends with the pipe.

    def run(self, options, *, ranks=2, launcher=False, **environment):
        """Run the script with options, also under the plugin's launcher."""
        self.pipe.send(([self._script, *options.split()], ranks, launcher, environment))
        codes = self.pipe.recv()
        files = (self._folder / f"{name}-{rank}" for name in ("out", "err") for rank in range(ranks))
        return Run(codes, "\n".join(file.read_text() for file in files))

    def stock(self, options, ranks=2):
        """The run without the plugin, which is made once."""
        if (options, ranks) not in self._stock:
            self._stock[options, ranks] = self.run(options, ranks=ranks)
        return self._stock[options, ranks]

    def launch(self, options, **environment):
        """Run the script under torchrun and the plugin's launcher, in processes of their own."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        program = [*torchrun, "-m", "megatron_fssdp", self._script, *options.split()]
        given = os.environ | FIXED | environment
        done = subprocess.run(program, env=given, cwd=ROOT, capture_output=True, text=True)
        return Run([done.returncode], done.stdout + done.stderr)


def _serve(name, folder, pipe):
    os.environ |= FIXED
    from tests.hosts import cpu_stand_ins

    cpu_stand_ins.install()
    for module in _MODULES[name]:
        importlib.import_module(module)
    with suppress(EOFError):
        while True:
            pipe.send(_codes(folder, *pipe.recv()))


def _codes(folder, program, ranks, launcher, environment):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    children, codes = dict[int, int](), [0] * ranks
    for rank in range(ranks):
        if not (child := os.fork()):
            signal.alarm(280)  # ends a rank that waits for ever
            sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            os.environ |= environment | place | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{folder}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os._exit(_code(program, launcher))
        children[child] = rank
    while children:
        child, status = os.wait()
        codes[children.pop(child)] = code = os.waitstatus_to_exitcode(status)
        if code:  # as under torchrun
            time.sleep(5)
            for survivor in children:
                os.kill(survivor, signal.SIGKILL)
    return codes


def _code(program, launcher):
    code = 0
    try:
        if launcher:
            from megatron_fssdp.megatron_adapter.entry.launcher import launch

            launch(program)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # os._exit leaves them out.
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1
