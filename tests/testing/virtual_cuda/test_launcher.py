import json
import sys

import pytest
import torch

from devtools.virtual_cuda import FindingKind, virtual_cuda
from devtools.virtual_cuda.books.findings import Finding
from devtools.virtual_cuda.programs.known_findings import KnownFinding, explained
from devtools.virtual_cuda.programs.launcher import EXIT_FINDINGS, report, run_program


def test_a_program_sees_its_arguments_and_its_exit_code_is_kept(tmp_path, monkeypatch):
    script = tmp_path / "program.py"
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for text, code in (("raise SystemExit(7)", 7), ("raise SystemExit('reason')", 1), ("1 / 0", 1), ("", 0)):
        script.write_text(f"import sys\nassert sys.argv[1:] == ['1']\n{text}\n")
        assert run_program([str(script), "1"], is_module=False) == code


@pytest.mark.parametrize("code", [0, 5])
def test_findings_change_only_the_exit_code_of_success(tmp_path, capsys, code):
    with virtual_cuda() as device:
        x = torch.ones(2, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)
    assert report(device, code, tmp_path) == (code or EXIT_FINDINGS)
    assert f"1. {FindingKind.RACE}" in capsys.readouterr().err
    facts = json.loads((tmp_path / "rank0.json").read_text())
    assert (facts["exit_code"], len(facts["findings"])) == (code or EXIT_FINDINGS, 1)


def test_known_findings_need_the_file_and_the_operator():
    row = KnownFinding(FindingKind.RACE, "megatron/core/a.py", "copy_", "it is harmless")
    same = Finding(FindingKind.RACE, "read by x (copy_)", "megatron/core/a.py:3 < ours.py:1")
    other_file = Finding(FindingKind.RACE, "read by x (copy_)", "megatron/core/b.py:3")
    ours = Finding(FindingKind.RACE, "read by x (copy_)", "ours.py:1 < megatron/core/a.py:3")
    other_operator = Finding(FindingKind.RACE, "read by x (add)", "megatron/core/a.py:3")
    assert explained([same, other_file, ours, other_operator], [row]) == (
        [other_file, ours, other_operator],
        [(same, row)],
    )


def test_known_findings_about_a_stream_need_its_file_and_the_stream_that_uses_its_memory():
    row = KnownFinding(FindingKind.FREED_IN_USE, "megatron/core/a.py", "the default stream", "so", True)
    ends = "end of memory of the stream made at [{}:1] (record_stream or a wait is missing)"
    of_megatron, of_ours = ends.format("megatron/core/a.py"), ends.format("ours.py")
    by_default, by_ours = "read by the default stream (mul)", "read by the stream made at [ours.py:3] (mul)"
    same = Finding(FindingKind.FREED_IN_USE, of_megatron, "ours.py:7", by_default, "ours.py:8")
    other_memory = Finding(FindingKind.FREED_IN_USE, of_ours, "ours.py:7", by_default, "megatron/core/a.py:8")
    other_reader = Finding(FindingKind.FREED_IN_USE, of_megatron, "ours.py:7", by_ours, "ours.py:8")
    assert explained([same, other_memory, other_reader], [row])[0] == [other_memory, other_reader]
