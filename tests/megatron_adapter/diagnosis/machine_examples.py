"""Made-up machines that the tests of the doctor examine."""

from pathlib import Path
from typing import Any

from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.megatron_adapter.diagnosis.devices import Backends, Devices, Gpu
from megatron_fssdp.megatron_adapter.diagnosis.examination import Facts
from megatron_fssdp.megatron_adapter.diagnosis.finding import Verdict
from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import InstalledPackage
from megatron_fssdp.megatron_adapter.diagnosis.seam_checks import Seams
from megatron_fssdp.megatron_adapter.support import capabilities

OK, NOTE, PROBLEM = Verdict.OK, Verdict.NOTE, Verdict.PROBLEM
HERE = Path("/site-packages/it")
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 << 30, (9, 0), has_grouped_kernel=True)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 << 30, (8, 0), has_grouped_kernel=False)
CPU_ONLY = Devices(num_cores=2, memory_bytes=8 << 30)
EIGHT_GPUS = Devices(num_cores=64, memory_bytes=1 << 40, gpus=(H100,) * 8, cuda_build="13.0")
ALL_BACKENDS = Backends(has_gloo=True, has_nccl=True, nccl_version="2.30.7")
A_SEAM = capabilities.Seam("megatron.core.moe", "Layer.route", "plans before the gate", "every strategy")

HEALTHY = Facts(
    python_version="3.12.1",
    executable="/usr/bin/python3",
    torch=InstalledPackage("2.6.0", HERE),
    megatron=InstalledPackage("0.19.2", HERE),
    seams=Seams(25),
    devices=CPU_ONLY,
    backends=ALL_BACKENDS,
)


def run_config(**parallelism: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8},
            "training": {"iterations": 1, "global_batch_size": 8},
            "parallelism": parallelism,
        }
    )


def verdicts(findings: Any) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in findings}
