import json

import pytest

from ..support.python_process import ROOT, python_output


@pytest.mark.slow
def test_variants_compute_the_same_on_the_cpu(tmp_path):
    out = tmp_path / "layer.json"
    words = ["benchmarks/gpu_layer.py", "--device", "cpu", "--sizes", "toy*2", "--repetitions", "2"]
    said = python_output(*words, "--out", out, cwd=ROOT, OMP_NUM_THREADS="1")
    record = json.loads(out.read_text())["sizes"]["toy*2"]
    assert record["relative_difference"] < 1e-5
    assert record["layer"]["fssdp"]["replicas"] > 0
    for variant in record["layer"].values():
        assert 0 < variant["busiest_s"][0] <= variant["busiest_s"][1] <= variant["busiest_s"][2]
    assert "fssdp: kernels of the busiest rank" in said
