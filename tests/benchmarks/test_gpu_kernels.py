import json
import sys

from benchmarks import gpu_kernels


def test_all_cases_run_on_a_virtual_device(tmp_path, monkeypatch):
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py", "--device", "virtual", "--out", str(out)])
    gpu_kernels.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row[2] for row in rows[:4]] == ["stock", "even, torch", "even, Triton", "exact, Triton"]
    assert {row[0] for row in rows} == {"remap", "packing", "addition", "attention"}
    assert all(row[3:] == [None] * 3 for row in rows)  # A virtual device has no times.
