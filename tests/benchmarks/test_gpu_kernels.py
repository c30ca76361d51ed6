import json

from ..support.python_process import ROOT, python_output


def test_all_cases_run_on_a_virtual_device(tmp_path):
    out = tmp_path / "kernels.json"
    words = ["benchmarks/gpu_kernels.py", "--device", "virtual", "--out", out]
    python_output(*words, cwd=ROOT, OMP_NUM_THREADS="1")
    rows = json.loads(out.read_text())["rows"]
    assert [row[2] for row in rows[:4]] == ["stock", "even, torch", "even, Triton", "exact, Triton"]
    assert {row[0] for row in rows} == {"remap", "packing", "addition", "attention"}
    assert all(row[3:] == [None] * 3 for row in rows)  # A virtual device has no times.
