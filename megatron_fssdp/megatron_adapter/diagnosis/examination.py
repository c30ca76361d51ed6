"""Runs all checks of a machine, in the order of the doctor's report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fssdp.config.quiet_output import quiet_output
from megatron_fssdp.megatron_adapter.diagnosis import packages
from megatron_fssdp.megatron_adapter.diagnosis.devices import (
    Gpus,
    check_devices,
    check_folder,
    look_at_gpus,
    shown_variables,
)
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, note
from megatron_fssdp.megatron_adapter.diagnosis.packages import look_for
from megatron_fssdp.megatron_adapter.support.broken_packages import TRANSFORMER_ENGINE, one_line

if TYPE_CHECKING:
    from megatron_fssdp.config.run.run_config import RunConfig


def examine_machine(
    run: "RunConfig | None" = None, folders: Sequence[tuple[str, Path]] = ()
) -> tuple[Finding, ...]:
    """Check this machine, and a run on it if there is one; this imports torch and Megatron.

    ``folders`` are checkpoint folders, each after the setting or option that names it.
    """
    with quiet_output():
        torch = look_for("torch", "torch")
        engine = look_for("transformer_engine", "transformer-engine", "transformer_engine.pytorch")
        megatron = look_for("megatron.core", "megatron-core")
        if megatron.broken_by == TRANSFORMER_ENGINE and engine.works:
            # Megatron imports more modules of Transformer Engine than the test above.
            engine = replace(engine, error=megatron.error)
        gpus = look_at_gpus() if torch.works else Gpus()
        findings = [
            packages.check_python(),
            packages.check_torch(torch),
            packages.check_megatron(megatron),
            *packages.check_seams(megatron.works),
            packages.check_transformer_engine(engine, bool(gpus.models)),
            *packages.check_strategies(),
            packages.check_kernels(),
        ]
        if torch.works:
            findings += check_devices(gpus, run, engine.works)
        else:
            names = ("gloo", "NCCL", "GPUs", "topology", *(("ranks",) if run else ()))
            findings += [note(name, "not checked, because torch cannot be imported") for name in names]
    findings.append(shown_variables())
    return (*findings, *(check_folder(folder, setting) for setting, folder in folders))


def torch_report() -> str:
    """Return torch's own report about the machine: versions, driver, GPUs, CPU and packages."""
    try:
        from torch.utils import collect_env

        return str(collect_env.get_pretty_env_info()).strip()
    except Exception as raised:  # torch may be missing or broken, which is a finding of its own
        return f"not available: {one_line(raised)}"
