"""Runs a script or a module on a virtual CUDA device, and reports its findings when it ends."""

import atexit
import contextlib
import json
import os
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from devtools.virtual_cuda.books.virtual_device import VirtualDevice
from devtools.virtual_cuda.programs.known_findings import explained
from devtools.virtual_cuda.programs.megatron_loop import megatron_on_virtual_cuda

EXIT_FINDINGS = 3  # The program succeeded, but the device has findings.
REPORT_VARIABLE = "MEGATRON_FSSDP_VIRTUAL_CUDA_REPORT"

USAGE = """usage: [torchrun …] -m devtools.virtual_cuda [--report FOLDER] SCRIPT.py ARGS…
       [torchrun …] -m devtools.virtual_cuda [--report FOLDER] -m MODULE ARGS…

Runs a program on a virtual CUDA device. When it ends, every rank prints the findings of its device.
The exit code is that of the program, or 3 if the program succeeds and the device has findings.
Known findings of Megatron's own code are printed with their reason and do not change the exit code.
--report (or the variable MEGATRON_FSSDP_VIRTUAL_CUDA_REPORT) writes FOLDER/rank<N>.json."""

_entered = contextlib.ExitStack()


def main(arguments: Sequence[str]) -> None:
    """Run a program on a virtual CUDA device, and end this process with an exit code; see ``USAGE``."""
    words, folder = list(arguments), os.environ.get(REPORT_VARIABLE)
    if words[:1] == ["--report"]:
        folder, words = words[1], words[2:]
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or words[0].startswith("-"):
        sys.exit(USAGE)
    # The plugin must not patch Megatron for CPU ranks.
    os.environ["MEGATRON_FSSDP_DEVICE"] = "cuda"
    # The device stays until this process ends, since functions at exit may ask for CUDA too.
    atexit.register(_leave)
    device = _entered.enter_context(megatron_on_virtual_cuda())
    code = run_program(words, is_module)
    with contextlib.suppress(Exception):  # After a failure, messages may be left without a partner.
        device.finish_all()
    sys.exit(report(device, code, Path(folder) if folder else None))


def run_program(words: list[str], is_module: bool) -> int:
    """Run a script or a module with its arguments like Python does, and return its exit code."""
    sys.argv = words
    try:
        if is_module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as request:
        if request.code is None or isinstance(request.code, int):
            return request.code or 0
        print(request.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def report(device: VirtualDevice, code: int, folder: Path | None) -> int:
    """Print the findings of this rank's device, write them into a folder, and return the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    unknown, known = explained(device.findings)
    counts = device.counts
    lines = [
        f"{len(unknown)} findings, {len(known)} known findings of Megatron's own code, "
        f"{len(device.host_syncs)} host synchronizations, {counts['operator']} operators, "
        f"{counts['collective']} collectives"
    ]
    lines += [f"{number}. {finding}" for number, finding in enumerate(unknown, 1)]
    reasons = Counter(f"{row.file}: {row.reason}" for _, row in known)
    lines += [f"known ({number}): {reason}" for reason, number in reasons.items()]
    for line in lines:
        print(f"[virtual CUDA] rank {rank}: {line}", file=sys.stderr, flush=True)
    code = code or (EXIT_FINDINGS if unknown else 0)
    if folder is not None:
        facts: dict[str, Any] = {
            "rank": rank,
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "exit_code": code,
            "findings": [asdict(finding) for finding in unknown],
            "known_findings": [{**asdict(finding), "reason": row.reason} for finding, row in known],
            "counts": dict(counts),
            "host_syncs": dict(Counter(f"{sync.name} at [{sync.place}]" for sync in device.host_syncs)),
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank{rank}.json").write_text(json.dumps(facts, indent=1))
    return code


def _leave() -> None:
    with contextlib.suppress(Exception):  # Process groups are gone, also those with unfinished messages.
        _entered.close()
