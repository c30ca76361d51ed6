"""Floating-point operations per second of a run's devices, and their share of the devices' peak."""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.reporting.records.recorded_run import RecordedRun
from megatron_fssdp.reporting.records.run_session import RunSession

_TERA = 1e12


@dataclass(frozen=True)
class GpuPeak:
    """Published peak of one kind of GPU.

    Attributes:
        pattern: Part of the name by which torch knows the GPU.
        bf16_tflops: Dense bf16 TFLOP/s of the tensor cores. That of fp16 is the same on all these GPUs.
        source: Where the number was published. Data sheets that state it with sparsity state twice as much.
    """

    pattern: str
    bf16_tflops: float
    source: str


# The first pattern that fits counts, so longer names come first.
GPU_PEAKS = (
    GpuPeak("H100 PCIe", 756, "NVIDIA H100 data sheet, 2022, H100 PCIe: 1,513 with sparsity"),
    GpuPeak("H100 NVL", 835, "NVIDIA H100 data sheet, 2024, H100 NVL: 1,671 with sparsity"),
    GpuPeak("H100", 989, "NVIDIA H100 data sheet, 2022, H100 SXM: 1,979 with sparsity"),
    GpuPeak("H200", 989, "NVIDIA H200 data sheet, 2023, H200 SXM: 1,979 with sparsity"),
    GpuPeak("A100", 312, "NVIDIA A100 data sheet, 2021, all forms: 312, 624 with sparsity"),
    GpuPeak("L40S", 362, "NVIDIA L40S data sheet, 2023: 362, 733 with sparsity"),
)


@dataclass(frozen=True)
class DeviceSpeed:
    """How fast the devices of a run computed.

    Attributes:
        tflops: TFLOP/s of a device, median over the iterations, by Megatron's formula of the model's
            operations.
        peak_tflops: The device's peak in bf16, or None if it is not known.
        device: Name of the device.
        shared_cores: Statement that ranks share cores. Empty if they do not.
    """

    tflops: float
    peak_tflops: float | None
    device: str
    shared_cores: str

    @property
    def text(self) -> str:
        """TFLOP/s as text, with the model FLOPs utilization (MFU) or the reason why it is missing."""
        words = f"{self.tflops:.3g}"
        if self.peak_tflops is not None:
            return f"{words} (MFU {self.tflops / self.peak_tflops:.1%} of {self.peak_tflops:,.0f} in bf16)"
        return f"{words} ({self.shared_cores or 'unknown peak'})"


def speed_of_devices(run: RecordedRun) -> DeviceSpeed | None:
    """Return the speed of a run's devices, or None if the run did not record its operations.

    Model FLOPs utilization: PaLM (Chowdhery et al., 2022), appendix B.

    Args:
        run: Records of the run. The devices of its last start count.
    """
    session = next((record.session for record in reversed(run.metrics) if record.session is not None), None)
    rates = [record.flops / record.iteration_s for record in run.metrics if record.flops]
    if session is None or not session.devices or not rates:
        return None
    tflops = float(np.median(rates)) / session.devices / _TERA
    return DeviceSpeed(tflops, _peak_of(session), session.device or "CPU", session.shared_cores)


def _peak_of(session: RunSession) -> float | None:
    if session.precision not in ("bf16", "fp16"):
        return None  # The table has the peaks of these types alone.
    return next((peak.bf16_tflops for peak in GPU_PEAKS if peak.pattern in session.device), None)
