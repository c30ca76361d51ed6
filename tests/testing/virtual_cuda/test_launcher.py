"""The launcher runs programs on virtual devices, prints findings, and ends with code 3 if there are any."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.virtual_cuda import FindingKind, virtual_cuda
from tests.support.virtual_cuda.books.findings import Finding
from tests.support.virtual_cuda.programs.known_findings import (
    KnownFinding,
    explained,
)
from tests.support.virtual_cuda.programs.launcher import EXIT_FINDINGS, Program, report

RACING = """
import sys
import torch
assert sys.argv[1:] == ["1"], sys.argv
assert torch.cuda.is_available()
x = torch.zeros(4, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    x.add_(1)
"""


def test_report_has_findings_counts_and_the_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "racing.py"
    script.write_text(RACING)
    path, arguments = list(sys.path), list(sys.argv)
    with virtual_cuda() as device:
        code = Program(str(script), False, ("1",)).run()
    sys.path[:], sys.argv[:] = path, arguments
    assert report(device, code, tmp_path / "reports") == EXIT_FINDINGS
    facts = json.loads((tmp_path / "reports" / "rank0.json").read_text())
    assert facts["exit_code"] == EXIT_FINDINGS
    # If the script's variables go at its end, their memory is given back too early, too.
    kinds = [finding["kind"] for finding in facts["findings"]]
    assert kinds in ([FindingKind.RACE], [FindingKind.RACE, FindingKind.FREED_IN_USE])
    assert f"rank 0: {len(kinds)} findings" in (printed := capfd.readouterr().err)
    assert all(kind in printed for kind in kinds)
    assert facts["counts"]["operator"] == 2


@pytest.mark.parametrize(
    ("body", "wanted"), [("pass", 0), ("raise SystemExit(7)", 7), ("raise ValueError('no')", 1)]
)
def test_exit_code_is_the_programs(body: str, wanted: int, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(body)
    path, arguments = list(sys.path), list(sys.argv)
    with virtual_cuda() as device:
        code = Program(str(script), False, ()).run()
    sys.path[:], sys.argv[:] = path, arguments
    assert report(device, code, None) == wanted


def test_known_findings_need_operator_and_file_of_megatron() -> None:
    row = KnownFinding(FindingKind.RACE, "megatron/core/a.py", "copy_", "it is harmless")
    same = Finding(FindingKind.RACE, "read by x (copy_)", "megatron/core/a.py:3 < ours.py:1")
    other_file = Finding(FindingKind.RACE, "read by x (copy_)", "megatron/core/b.py:3")
    ours = Finding(FindingKind.RACE, "read by x (copy_)", "ours.py:1 < megatron/core/a.py:3")
    other_operator = Finding(FindingKind.RACE, "read by x (add)", "megatron/core/a.py:3")
    unknown, known = explained([same, other_file, ours, other_operator], [row])
    assert unknown == [other_file, ours, other_operator]
    assert known == [(same, row)]


def test_known_findings_about_a_stream_need_its_file_and_the_stream_that_uses_its_memory() -> None:
    row = KnownFinding(FindingKind.FREED_IN_USE, "megatron/core/a.py", "the default stream", "so", True)
    ends = "end of memory of the stream made at [{}:1] (record_stream or a wait is missing)"
    of_megatron, of_ours = ends.format("megatron/core/a.py"), ends.format("ours.py")
    by_default, by_ours = "read by the default stream (mul)", "read by the stream made at [ours.py:3] (mul)"
    same = Finding(FindingKind.FREED_IN_USE, of_megatron, "ours.py:7", by_default, "ours.py:8")
    other_memory = Finding(FindingKind.FREED_IN_USE, of_ours, "ours.py:7", by_default, "megatron/core/a.py:8")
    other_reader = Finding(FindingKind.FREED_IN_USE, of_megatron, "ours.py:7", by_ours, "ours.py:8")
    unknown, known = explained([same, other_memory, other_reader], [row])
    assert unknown == [other_memory, other_reader]
    assert known == [(same, row)]


@pytest.mark.slow
def test_all_ranks_of_torchrun_print_their_findings(tmp_path: Path) -> None:
    script = tmp_path / "racing.py"
    script.write_text(
        RACING + 'import torch.distributed as dist\ndist.init_process_group("nccl")\n'
        "dist.all_reduce(x)\nassert x.tolist() == [2.0] * 4, x\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.support.virtual_cuda", "--report", str(tmp_path / "reports")]
    done = subprocess.run(
        [*command, str(script), "1"],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode
    for rank in range(2):
        assert f"rank {rank}: 1. {FindingKind.RACE}" in done.stderr, done.stderr
        facts = json.loads((tmp_path / "reports" / f"rank{rank}.json").read_text())
        assert facts["exit_code"] == EXIT_FINDINGS
        assert facts["counts"]["collective"] == 1
