"""All facts and all checks, in the order of the report."""

import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
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
from megatron_fssdp.megatron_adapter.diagnosis.package_checks import (
    check_apex,
    check_megatron,
    check_python,
    check_torch,
    check_transformer_engine,
)
from megatron_fssdp.megatron_adapter.diagnosis.seam_checks import Seams, check_seams, look_for_seams

if TYPE_CHECKING:
    from megatron_fssdp.config.run_config import RunConfig


@dataclass(frozen=True)
class Facts:
    """What a machine has; every part can be made up for a test.

    Attributes:
        python_version: Of the interpreter.
        executable: The interpreter.
        torch: What was found of it.
        megatron: What was found of megatron-core.
        engine: What was found of Transformer Engine.
        apex: What is installed under that name.
        seams: ``None`` if Megatron cannot be imported.
        devices: ``None`` if torch cannot be imported.
        backends: ``None`` if torch cannot be imported.
        launch: The ranks, if torchrun started any.
        folders: Checkpoint folders, by the setting that names them.
    """

    python_version: str
    executable: str
    torch: InstalledPackage
    megatron: InstalledPackage
    engine: InstalledPackage = field(default_factory=InstalledPackage)
    apex: ApexPackage = field(default_factory=ApexPackage)
    seams: Seams | None = None
    devices: Devices | None = None
    backends: Backends | None = None
    launch: Launch = field(default_factory=Launch)
    folders: tuple[tuple[str, FolderState], ...] = ()


def gather_facts(folders: Sequence[tuple[str, Path]]) -> Facts:
    """Look at this machine, which takes as long as importing torch and Megatron does.

    Args:
        folders: Settings that name checkpoint folders, and the folders.
    """
    with _quiet_imports():
        torch = look_for("torch", "torch")
        engine = look_for("transformer_engine", "transformer-engine", "transformer_engine.pytorch")
        megatron = look_for("megatron.core", "megatron-core")
        return Facts(
            python_version=platform.python_version(),
            executable=sys.executable,
            torch=torch,
            megatron=megatron,
            engine=engine,
            apex=look_for_apex(),
            seams=look_for_seams() if megatron.works else None,
            devices=look_at_devices() if torch.works else None,
            backends=look_at_backends() if torch.works else None,
            launch=Launch(_whole_number("WORLD_SIZE"), _whole_number("LOCAL_WORLD_SIZE")),
            folders=tuple((setting, look_at_folder(folder)) for setting, folder in folders),
        )


def diagnose(facts: Facts, run: "RunConfig | None") -> tuple[Finding, ...]:
    """What the facts mean.

    Args:
        facts: What the machine has.
        run: A run that is wanted on it; ``None`` for any.
    """
    has_gpus = facts.devices is not None and bool(facts.devices.gpus)
    findings = [
        check_python(facts.python_version, facts.executable),
        check_torch(facts.torch),
        check_megatron(facts.megatron),
        *check_seams(facts.seams),
        check_transformer_engine(facts.engine, has_gpus),
        check_apex(facts.apex),
    ]
    if facts.devices is None or facts.backends is None:
        names = ("gloo", "NCCL", "GPUs", "topology", *(("ranks",) if run is not None else ()))
        unknown = "not looked for: torch cannot be imported"
        findings += [Finding(name, unknown, Verdict.NOTE) for name in names]
    else:
        cut = run.parallelism if run is not None else None
        findings += [
            check_gloo(facts.backends),
            check_nccl(facts.backends, has_gpus),
            check_gpus(facts.devices),
            check_topology(facts.devices, facts.launch, cut),
        ]
        if run is not None and cut is not None:
            wanted = run.training.device
            findings.append(check_ranks(facts.devices, facts.launch, cut, wanted))
            if cut.context > 1:
                findings.append(check_context(facts.devices, facts.engine.works, cut.context, wanted))
    findings += [check_folder(state, setting) for setting, state in facts.folders]
    return tuple(findings)


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """What packages print, log and warn of while they are imported is no part of the report."""
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
