"""Gathers all facts about a machine and runs all checks, in the order of the doctor's report."""

import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fssdp.megatron_adapter.diagnosis.checkpoint_folder import (
    FolderState,
    check_folder,
    look_at_folder,
)
from megatron_fssdp.megatron_adapter.diagnosis.device_checks import (
    Launch,
    check_context,
    check_expert_path,
    check_gloo,
    check_gpus,
    check_nccl,
    check_ranks,
    check_topology,
)
from megatron_fssdp.megatron_adapter.diagnosis.devices import (
    Backends,
    Devices,
    look_at_backends,
    look_at_devices,
)
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict
from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import (
    ApexPackage,
    InstalledPackage,
    look_for,
    look_for_apex,
)
from megatron_fssdp.megatron_adapter.diagnosis.kernel_check import check_kernels
from megatron_fssdp.megatron_adapter.diagnosis.package_checks import (
    TRANSFORMER_ENGINE,
    check_apex,
    check_megatron,
    check_python,
    check_torch,
    check_transformer_engine,
)
from megatron_fssdp.megatron_adapter.diagnosis.seam_checks import Seams, check_seams, look_for_seams
from megatron_fssdp.megatron_adapter.diagnosis.strategy_checks import (
    InstalledStrategies,
    check_strategies,
    look_for_strategies,
)
from megatron_fssdp.planning.native.kernel import KernelForm, kernel_form

if TYPE_CHECKING:
    from megatron_fssdp.config.run.run_config import RunConfig


@dataclass(frozen=True)
class Facts:
    """All facts about a machine. Tests construct machines that do not exist.

    Attributes:
        python_version: Version of the Python interpreter.
        executable: Path of the Python interpreter.
        torch: Installation of torch.
        megatron: Installation of megatron-core.
        engine: Installation of Transformer Engine.
        apex: Package that is installed under the name ``apex``.
        seams: Seams found in Megatron; ``None`` if Megatron cannot be imported.
        strategies: Strategies of this package, and those that other installed packages bring.
        kernels: Form in which planning kernels run.
        devices: Devices of the machine; ``None`` if torch cannot be imported.
        backends: Back ends of torch.distributed; ``None`` if torch cannot be imported.
        launch: Ranks that torchrun started.
        folders: Setting or option that names a checkpoint folder, and the state of the folder.
    """

    python_version: str
    executable: str
    torch: InstalledPackage
    megatron: InstalledPackage
    engine: InstalledPackage = field(default_factory=InstalledPackage)
    apex: ApexPackage = field(default_factory=ApexPackage)
    seams: Seams | None = None
    strategies: InstalledStrategies = field(default_factory=InstalledStrategies)
    kernels: KernelForm = field(default_factory=lambda: KernelForm(is_compiled=True))
    devices: Devices | None = None
    backends: Backends | None = None
    launch: Launch = field(default_factory=Launch)
    folders: tuple[tuple[str, FolderState], ...] = ()


def gather_facts(folders: Sequence[tuple[str, Path]]) -> Facts:
    """Gather the facts about this machine. This takes as long as importing torch and Megatron.

    Args:
        folders: Setting or option that names a checkpoint folder, and the folder.
    """
    with _quiet_imports():
        torch = look_for("torch", "torch")
        engine = look_for("transformer_engine", "transformer-engine", "transformer_engine.pytorch")
        megatron = look_for("megatron.core", "megatron-core")
        if megatron.broken_by == TRANSFORMER_ENGINE and engine.works:
            # Megatron imports more modules of Transformer Engine than the test above.
            engine = replace(engine, error=megatron.error)
        return Facts(
            python_version=platform.python_version(),
            executable=sys.executable,
            torch=torch,
            megatron=megatron,
            engine=engine,
            apex=look_for_apex(),
            seams=look_for_seams() if megatron.works else None,
            strategies=look_for_strategies(),
            kernels=kernel_form(),
            devices=look_at_devices() if torch.works else None,
            backends=look_at_backends() if torch.works else None,
            launch=Launch(_whole_number("WORLD_SIZE"), _whole_number("LOCAL_WORLD_SIZE")),
            folders=tuple((setting, look_at_folder(folder)) for setting, folder in folders),
        )


def diagnose(facts: Facts, run: "RunConfig | None") -> tuple[Finding, ...]:
    """Run all checks that apply.

    Args:
        facts: Facts about the machine.
        run: Run to check on this machine; ``None`` checks the machine only.

    Returns:
        The findings, in the order of the report.
    """
    has_gpus = facts.devices is not None and bool(facts.devices.gpus)
    findings = [
        check_python(facts.python_version, facts.executable),
        check_torch(facts.torch),
        check_megatron(facts.megatron),
        *check_seams(facts.seams),
        check_transformer_engine(facts.engine, has_gpus),
        check_apex(facts.apex),
        *check_strategies(facts.strategies),
        check_kernels(facts.kernels),
    ]
    if facts.devices is None or facts.backends is None:
        names = ("gloo", "NCCL", "GPUs", "topology", *(("ranks",) if run is not None else ()))
        unknown = "not checked, because torch cannot be imported"
        findings += [Finding(name, unknown, Verdict.NOTE) for name in names]
    else:
        parallelism = run.parallelism if run is not None else None
        findings += [
            check_gloo(facts.backends),
            check_nccl(facts.backends, has_gpus),
            check_gpus(facts.devices),
            *check_expert_path(facts.devices),
            check_topology(facts.devices, facts.launch, parallelism),
        ]
        if run is not None and parallelism is not None:
            wanted = run.training.device
            findings.append(check_ranks(facts.devices, facts.launch, parallelism, wanted))
            if parallelism.context > 1:
                findings.append(check_context(facts.devices, facts.engine.works, parallelism.context, wanted))
    findings += [check_folder(state, setting) for setting, state in facts.folders]
    return tuple(findings)


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Keep output, log lines and warnings of imported packages out of the report."""
    disabled = logging.root.manager.disable
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)


def _whole_number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() and int(text) > 0 else None
