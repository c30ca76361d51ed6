"""Runs a script or a module on a virtual CUDA device, and reports its findings when it ends."""

import atexit
import contextlib
import datetime
import importlib.util
import json
import os
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.virtual_cuda.books.virtual_device import VirtualDevice
from tests.support.virtual_cuda.programs.known_findings import explained

EXIT_FINDINGS = 3
"""Exit code of a rank whose program succeeded, but whose device has findings."""

REPORT_VARIABLE = "MEGATRON_FSSDP_VIRTUAL_CUDA_REPORT"
"""Environment variable with the folder for the reports of all ranks."""

USAGE = """usage: [torchrun …] -m tests.support.virtual_cuda [--report FOLDER] SCRIPT.py ARGS…
       [torchrun …] -m tests.support.virtual_cuda [--report FOLDER] -m MODULE ARGS…
       python -m tests.support.virtual_cuda --replacements

Runs a program on a virtual CUDA device. When it ends, every rank prints the findings of its device.
The exit code is that of the program, or 3 if the program succeeds and the device has findings.
Known findings of Megatron's own code are printed with their reason and do not change the exit code.
--report (or the variable MEGATRON_FSSDP_VIRTUAL_CUDA_REPORT) writes FOLDER/rank<N>.json.
--replacements prints what is replaced for Megatron, by what, and why.
"""
_OTHER_RANKS_S = 30.0  # time for the other ranks to print their findings before a failing rank ends the job


@dataclass(frozen=True)
class Program:
    """What the launcher runs.

    Attributes:
        name: Path of a script, or name of a module.
        is_module: Whether it is a module.
        arguments: Arguments of the program.
    """

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    def run(self) -> int:
        """Run the program like Python does, and return its exit code."""
        sys.argv = [self.name, *self.arguments]
        try:
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(self.name).resolve().parent))
                runpy.run_path(self.name, run_name="__main__")
        except SystemExit as request:
            if request.code is None or isinstance(request.code, int):
                return request.code or 0
            print(request.code, file=sys.stderr)
            return 1
        except BaseException:
            traceback.print_exc()
            return 1
        return 0


def main(arguments: Sequence[str]) -> None:
    """Run a program on a virtual CUDA device, and end this process with an exit code.

    Args:
        arguments: Arguments of the launcher, followed by the program and its arguments.

    Raises:
        SystemExit: Always; with the exit code.
    """
    program, folder = _parsed(list(arguments))
    # The plugin must not patch Megatron for CPU ranks.
    os.environ["MEGATRON_FSSDP_DEVICE"] = "cuda"
    device = _device()
    code = program.run()
    with contextlib.suppress(Exception):  # After a failure, messages may be left without a partner.
        device.finish_all()
    code = report(device, code, folder)
    _meet_other_ranks(waits=bool(code))
    sys.exit(code)


def report(device: VirtualDevice, code: int, folder: Path | None) -> int:
    """Print the findings of this rank's device, write them into a file if asked, and return the exit code.

    Args:
        device: Virtual device of this rank.
        code: Exit code of the program.
        folder: Folder for the file ``rank<N>.json``; None for no file.
    """
    rank = int(os.environ.get("RANK", "0"))
    unknown, known = explained(device.findings)
    counts = device.counts
    lines = [
        f"[virtual CUDA] rank {rank}: {len(unknown)} findings, {len(known)} known findings of Megatron's own "
        f"code, {len(device.host_syncs)} host synchronizations, {counts['operator']} operators, "
        f"{counts['collective']} collectives"
    ]
    lines += [f"[virtual CUDA] rank {rank}: {number + 1}. {one}" for number, one in enumerate(unknown)]
    for reason, number in Counter(f"{row.file}: {row.reason}" for _, row in known).items():
        lines.append(f"[virtual CUDA] rank {rank}: known ({number}): {reason}")
    print("\n".join(lines), file=sys.stderr, flush=True)
    code = code or (EXIT_FINDINGS if unknown else 0)
    if folder is not None:
        facts: dict[str, Any] = {
            "rank": rank,
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "exit_code": code,
            "findings": [asdict(finding) for finding in unknown],
            "known_findings": [{**asdict(finding), "reason": row.reason} for finding, row in known],
            "counts": dict(counts),
            "host_syncs": dict(Counter(f"{sync.what} at [{sync.place}]" for sync in device.host_syncs)),
        }
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"rank{rank}.json.partial"
        partial.write_text(json.dumps(facts, indent=1))
        partial.rename(folder / f"rank{rank}.json")
    return code


def _parsed(arguments: list[str]) -> tuple[Program, Path | None]:
    folder = os.environ.get(REPORT_VARIABLE)
    if arguments[:1] == ["--replacements"]:
        from tests.support.virtual_cuda.programs.megatron_loop import described_replacements

        print(described_replacements())
        sys.exit(0)
    if arguments[:1] == ["--report"] and len(arguments) > 1:
        folder, arguments = arguments[1], arguments[2:]
    is_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if is_module else arguments
    if not rest or rest[0].startswith("-"):
        print(USAGE, file=sys.stderr, end="")
        sys.exit(0 if rest[:1] in (["-h"], ["--help"]) else 2)
    if not is_module and not Path(rest[0]).is_file():
        print(f"{USAGE}\nscript: got {rest[0]}, which is not a file", file=sys.stderr)
        sys.exit(2)
    return Program(rest[0], is_module, tuple(rest[1:])), Path(folder) if folder else None


def _device() -> VirtualDevice:
    """A virtual device that stays until this process ends, since functions at exit may ask for CUDA too."""
    atexit.register(_leave)  # Functions that are registered later run earlier.
    if importlib.util.find_spec("megatron.training") is not None:
        from tests.support.virtual_cuda.programs.megatron_loop import megatron_on_virtual_cuda

        return _entered.enter_context(megatron_on_virtual_cuda())
    from tests.support.virtual_cuda.session import virtual_cuda

    return _entered.enter_context(virtual_cuda())


_entered = contextlib.ExitStack()


def _leave() -> None:
    with contextlib.suppress(Exception):  # Process groups are gone, also those with unfinished messages.
        _entered.close()


def _meet_other_ranks(*, waits: bool) -> None:
    """Tell the other ranks that this rank has printed its findings, and wait for theirs if asked.

    torchrun ends all ranks as soon as one of them fails.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or "MASTER_PORT" not in os.environ:
        return
    timeout = datetime.timedelta(seconds=_OTHER_RANKS_S)
    with contextlib.suppress(Exception):  # The store may be gone with another rank.
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout=timeout
        )
        key = f"virtual_cuda/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if store.add(f"{key}/reported", 1) == world_size:
            store.set(f"{key}/all", "")
        if waits:
            store.wait([f"{key}/all"], timeout)
