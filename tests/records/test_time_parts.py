from pathlib import Path

import numpy as np
import pytest
from megatron_fssdp.reporting.records.device_speed import GPU_PEAKS, speed_of_devices
from megatron_fssdp.reporting.records.time_parts import MEASURED_PARTS, layer_parts, mean_parts_s, time_parts

from megatron_fssdp.records.metrics import IterationMetrics, LayerMetrics, PassMetrics, RunSession
from megatron_fssdp.records.recorded_run import RecordedRun


def iteration(
    number: int, passes_s: float, forward: PassMetrics | None = None, num_layers: int = 1
) -> IterationMetrics:
    layer = LayerMetrics(1, 2.0, 1.5, 0, 0, 0, 0, spag_exposed_s=0.5, forward=forward, backward=forward)
    return IterationMetrics(
        number, 5.0, None, 10.0, 1.0, (layer,) * num_layers, reshard_s=1.0, passes_s=passes_s
    )


def run_of(*records: IterationMetrics) -> RecordedRun:
    return RecordedRun(Path("x"), "fssdp", records)


def test_parts_are_those_of_the_slowest_experts_and_add_up() -> None:
    # Experts take 1 s on the mean rank and 1.5 s on the slowest, for which the combine waits 0.5 s.
    forward = PassMetrics(other_s=0.25, dispatch_s=0.5, experts_s=1.0, combine_s=0.75, experts_slowest_s=1.5)
    run = run_of(iteration(1, 8.0, forward), iteration(2, 8.0), iteration(3, 0.0))
    found = time_parts(run)
    assert set(found) == set(MEASURED_PARTS)
    np.testing.assert_allclose(sum(found.values()), 10.0)
    wanted = {
        "passes": [0, 7.5, 0],
        "outside": [8 - 5.5, 0, 0],
        "other compute": [0.5, 0, 0],
        "experts": [3, 0, 0],
        "all-to-all": [1.5, 0, 0],
        "waiting for spAG": [0.5, 0.5, 0.5],
        "rest": [1, 1, 8.5],
    }
    for part, seconds in wanted.items():
        np.testing.assert_allclose(found[part], seconds, err_msg=part)
    assert layer_parts(run, "forward")["combine"].tolist() == [0.75]
    assert layer_parts(run_of(iteration(1, 8.0)), "backward") == {}
    assert mean_parts_s(run)["passes"] == 3.75


def test_layers_of_pipeline_stages_that_work_at_the_same_time_share_the_passes() -> None:
    forward = PassMetrics(1.0, 1.0, 1.0, 1.0, 1.0)
    found = time_parts(run_of(iteration(1, 8.5, forward, num_layers=2)))
    np.testing.assert_allclose(found["experts"], 4 * 8.5 / 17)
    np.testing.assert_allclose(sum(found.values()), 10.0)
    assert found["outside"] == 0


@pytest.mark.parametrize(
    ("device", "precision", "cores", "text"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 0, "200 (MFU 20.2% of 989 in bf16)"),
        ("NVIDIA H100 PCIe", "fp16", 0, "200 (MFU 26.5% of 756 in bf16)"),
        ("NVIDIA H100 80GB HBM3", "fp32", 0, "200 (unknown peak)"),
        ("Another GPU", "bf16", 0, "200 (unknown peak)"),
        ("", "fp32", 2, "200 (4 ranks share 2 cores)"),
    ],
)
def test_operations_per_second_are_of_one_device(device: str, precision: str, cores: int, text: str) -> None:
    session = RunSession("fssdp", 2, 4, cores, devices=8, device=device, precision=precision)
    records = [
        IterationMetrics(number, 5.0, None, 2.0, 1.0, flops=3.2e15, session=session if number == 1 else None)
        for number in (1, 2)
    ]
    speed = speed_of_devices(run_of(*records))
    assert speed is not None
    assert speed.text == text
    assert speed_of_devices(run_of(iteration(1, 8.0))) is None


def test_every_peak_has_a_source_and_can_be_found() -> None:
    for number, peak in enumerate(GPU_PEAKS):
        assert "data sheet" in peak.source
        assert not any(earlier.pattern in peak.pattern for earlier in GPU_PEAKS[:number])
