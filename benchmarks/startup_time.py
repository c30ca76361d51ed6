"""Measures the time that importing and registering the plugin adds to Megatron's own start.

Each sample is a new interpreter. It imports the same modules of Megatron as a pretraining script. Then it
imports and registers the plugin, which is timed separately. On a machine without an accelerator, the CPU
runtime is installed before. It is not timed, because runs on GPUs do not need it.

    python benchmarks/startup_time.py [SAMPLES]
"""

import statistics
import subprocess
import sys

_CODE = """
import time
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
started_s = time.perf_counter()
import megatron.training.arguments, megatron.training.training
import megatron.core.models.gpt.gpt_model, megatron.core.models.gpt.gpt_layer_specs
megatron_s = time.perf_counter() - started_s
cpu_runtime.install()
started_s = time.perf_counter()
import megatron_fssdp
megatron_fssdp.register()
print(megatron_s, time.perf_counter() - started_s)
"""


def main() -> None:
    """Print medians, minima and maxima."""
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows = []
    for _ in range(samples):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _CODE], capture_output=True, text=True, check=True
        )
        rows.append([float(value) for value in done.stdout.split()])
    for name, column in zip(
        ("Megatron's imports", "plugin, in addition"), zip(*rows, strict=True), strict=True
    ):
        print(
            f"{name}: median {statistics.median(column):.3f} s, min {min(column):.3f}, max {max(column):.3f} "
            f"({samples} new interpreters)"
        )


if __name__ == "__main__":
    main()
