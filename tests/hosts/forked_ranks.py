"""Runs scripts on ranks that are forked from one process, which has imported a host: imports take a minute."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

FOLDER = Path(__file__).parent
MODULES = {
    "bridge": ("megatron.bridge", "megatron.bridge.training.pretrain", "tests.hosts.bridge_configuration"),
    "swift": ("mcore_bridge.model.register", "swift.megatron.trainers", "swift.megatron.pipelines"),
}
_LIMIT_S = 280


@dataclass(frozen=True)
class Run:
    """What the ranks of a script have printed; rank 0's codes first."""

    codes: list[int]
    lines: list[dict[str, Any]]  # of JSON
    log: str

    def values(self, name: str) -> list[Any]:
        return [line[name] for line in self.lines if name in line]

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.log.splitlines() if "[fssdp] error" in line]


class Host:
    """A process that has imported a host, and forks ranks; ``folder`` gets their output."""

    def __init__(self, name: str, folder: Path) -> None:
        self._script, self._folder = FOLDER / f"{name}_training.py", folder
        self._stock: dict[tuple[str, int], Run] = {}
        self._environment = os.environ | {"MEGATRON_FSSDP_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "imports.log").open("w"),
            cwd=FOLDER.parents[1],
            env=self._environment,
            text=True,
        )

    def run(
        self,
        options: str,
        *,
        ranks: int = 2,
        launcher: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Run:
        """Run the host's script with options, also under the plugin's launcher."""
        assert self._process.stdin and self._process.stdout
        request = (
            [str(self._script), *options.split()],
            ranks,
            launcher,
            dict(environment or {}),
            str(self._folder),
        )
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        printed = (self._folder / "printed").read_text(encoding="utf-8").splitlines()
        logs = [(self._folder / f"log-{rank}").read_text(encoding="utf-8") for rank in range(ranks)]
        return Run(codes, _json_lines(printed), "\n".join([*printed, *logs]))

    def stock(self, options: str, ranks: int = 2) -> Run:
        """The run without the plugin, which is made once."""
        if (options, ranks) not in self._stock:
            self._stock[options, ranks] = self.run(options, ranks=ranks)
        return self._stock[options, ranks]

    def launch(self, options: str) -> Run:
        """Run the host's script under torchrun and the plugin's launcher, in processes of their own."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        program = [*torchrun, "-m", "megatron_fssdp", str(self._script), *options.split()]
        done = subprocess.run(
            program, env=self._environment, cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=580
        )
        return Run([done.returncode], _json_lines(done.stdout.splitlines()), done.stdout + done.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # It ends where its input ends.


def _json_lines(printed: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed if line.startswith("{")]


def _serve(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tests.hosts import cpu_stand_ins

    cpu_stand_ins.install()
    for module in MODULES[name]:
        importlib.import_module(module)
    for line in sys.stdin:
        answers.write(json.dumps(_run(*json.loads(line))) + "\n")
        answers.flush()


def _run(
    program: list[str], ranks: int, launcher: bool, environment: dict[str, str], folder: str
) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    children = {}
    (Path(folder) / "printed").write_text("")
    for rank in range(ranks):
        if not (child := os.fork()):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            os.environ |= environment | places | own
            for number, file in ((1, "printed"), (2, f"log-{rank}")):
                flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if number == 1 else os.O_TRUNC)
                os.dup2(os.open(f"{folder}/{file}", flags), number)
            os._exit(_code(program, launcher))
        children[child] = rank
    codes, end = [-signal.SIGKILL] * ranks, time.monotonic() + _LIMIT_S
    while children and time.monotonic() < end:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[children.pop(child)] = code = os.waitstatus_to_exitcode(status)
            end = min(end, time.monotonic() + 10) if code else end
        else:
            time.sleep(0.05)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return codes


def _code(program: Sequence[str], launcher: bool) -> int:
    try:
        if launcher:
            from megatron_fssdp.megatron_adapter.entry.launcher import launch

            launch(program)
        else:
            sys.argv = list(program)
            runpy.run_path(program[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    import atexit

    atexit._run_exitfuncs()  # which os._exit leaves out
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.path[0] = str(FOLDER.parents[1])
    _serve(sys.argv[1])
