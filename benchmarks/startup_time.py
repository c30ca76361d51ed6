"""What importing and registering the plugin adds to Megatron's own start.

Each sample is a fresh interpreter that imports what a pretraining script imports from
Megatron, and then, timed on its own, imports and registers the plugin. On a machine
without an accelerator the CPU runtime is installed before, untimed: a GPU run has none.

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
    """Print medians and spread."""
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows = []
    for _ in range(samples):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _CODE], capture_output=True, text=True, check=True
        )
        rows.append([float(value) for value in done.stdout.split()])
    for name, column in zip(("Megatron's imports", "plugin, on top"), zip(*rows, strict=True), strict=True):
        print(
            f"{name}: median {statistics.median(column):.3f} s, min {min(column):.3f}, max {max(column):.3f} "
            f"({samples} fresh interpreters)"
        )


if __name__ == "__main__":
    main()
