"""Compares one grouped matrix product with a loop over experts, forward and backward, in one run.

The result decides where ``megatron_fssdp/runtime/experts/grouped_ffn.py`` uses ``grouped_mm``. The benchmark
uses the GPU if there is one. Both forms get the same experts and rows and take turns. Ratios compare
measurements of the same turn.

    python benchmarks/grouped_ffn.py [REPETITIONS]
"""

import statistics
import sys
import time

import torch
from torch.nn import functional

from megatron_fssdp.runtime.experts import grouped_ffn
from megatron_fssdp.runtime.experts.expert_activation import ExpertActivation
from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights

# Number of present experts, model dimension, ffn dimension, number of rows.
CPU_SHAPES = ((2, 64, 128, 512), (4, 256, 512, 1024), (8, 256, 1024, 2048))
GPU_SHAPES = ((2, 1024, 4096, 4096), (8, 2048, 1408, 16384), (8, 4096, 14336, 8192), (32, 2048, 1024, 32768))


def main() -> None:
    """Print one line for each shape and data type."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    print(f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}, torch {torch.__version__}")
    for shape in GPU_SHAPES if on_gpu else CPU_SHAPES:
        for dtype in (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16):
            print(_compare(shape, dtype, device, repetitions))


def _compare(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, repetitions: int
) -> str:
    num_experts, model_dim, ffn_dim, num_rows = shape
    generator = torch.Generator().manual_seed(0)

    def weight(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.02).to(device, dtype).requires_grad_()

    experts = [
        ExpertWeights(weight(2 * ffn_dim, model_dim), weight(model_dim, ffn_dim)) for _ in range(num_experts)
    ]
    rows = [num_rows // num_experts] * num_experts
    x = torch.randn(sum(rows), model_dim, generator=generator).to(device, dtype).requires_grad_()
    probs = torch.rand(sum(rows), generator=generator).to(device)
    upstream = torch.randn(sum(rows), model_dim, generator=generator).to(device, dtype)
    activation = ExpertActivation(functional.silu, gated=True)
    seconds: dict[str, list[float]] = {"loop": [], "grouped": []}
    for _ in range(repetitions + 3):
        for name, form in (("loop", grouped_ffn._one_by_one), ("grouped", grouped_ffn._grouped)):
            _synchronize(device)
            started_s = time.perf_counter()
            form(x, probs, rows, experts, activation).backward(upstream)
            _synchronize(device)
            seconds[name].append(time.perf_counter() - started_s)
    loop, grouped = seconds["loop"][3:], seconds["grouped"][3:]
    ratios = statistics.quantiles([a / b for a, b in zip(loop, grouped, strict=True)], n=4)
    return (
        f"G={num_experts} M={model_dim} F={ffn_dim} rows={num_rows} {str(dtype).removeprefix('torch.')}: "
        f"loop {statistics.median(loop) * 1e3:.2f} ms, grouped {statistics.median(grouped) * 1e3:.2f} ms, "
        f"loop/grouped {ratios[1]:.2f} (quartiles {ratios[0]:.2f}-{ratios[2]:.2f})"
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
