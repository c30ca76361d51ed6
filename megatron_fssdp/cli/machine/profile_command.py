"""``megatron-fssdp profile``: measures a cluster and writes the YAML that describes it."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import refuse_special_file

if TYPE_CHECKING:
    from megatron_fssdp.megatron_adapter.diagnosis.cluster_profiler import ProfileSettings


@dataclass(frozen=True)
class ProfileRequest:
    """Options of ``megatron-fssdp profile``.

    Attributes:
        out: YAML file to write.
        settings: Settings of the measurement.
        nproc: Number of ranks to start on this machine, or None under torchrun.
    """

    out: Path
    settings: "ProfileSettings"
    nproc: int | None

    def check(self) -> None:
        """Check the options before ranks communicate.

        Raises:
            ConfigurationError: An option is wrong. The message gives the reason.
        """
        under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        if under_torchrun and self.nproc is not None:
            raise ConfigurationError(
                f"--nproc {self.nproc}: torchrun has already started the ranks; remove this option"
            )
        if not under_torchrun and self.nproc is None:
            raise ConfigurationError(
                "no ranks to measure; give --nproc N, or start the command with "
                "torchrun --nproc-per-node N -m megatron_fssdp profile --out FILE.yaml"
            )
        self.settings.check_ranks(int(os.environ["WORLD_SIZE"]) if self.nproc is None else self.nproc)
        if self.is_writer:
            _check_writable(self.out)

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the file, or starts the rank that writes it."""
        return int(os.environ.get("RANK", 0)) == 0


def profile(request: ProfileRequest) -> int:
    """Measure as one of torchrun's ranks, or start new ranks that measure.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: The input is invalid. Nothing was measured.
    """
    request.check()
    return _start_ranks(request.nproc) if request.nproc is not None else _measure(request)


def _measure(request: ProfileRequest) -> int:
    from rich.console import Console

    from megatron_fssdp.config.cluster_files import cluster_yaml
    from megatron_fssdp.config.written_files import written_file
    from megatron_fssdp.megatron_adapter.diagnosis.cluster_profiler import profile_cluster
    from megatron_fssdp.report.cluster_table import cluster_table

    cluster = profile_cluster(request.settings, lambda line: print(line, flush=True))
    if request.is_writer:
        text = cluster_yaml(cluster, "Written by megatron-fssdp profile. Units: seconds, bytes, flops.")
        with written_file(request.out, "--out") as partial:
            partial.write_text(text, encoding="utf-8")
        Console(markup=False).print(cluster_table(cluster))
        print(f"wrote {request.out}", flush=True)
    return 0


def _start_ranks(nproc: int) -> int:
    from megatron_fssdp.cli.ranks.rank_processes import exit_code_after, run_to_the_end

    words = sys.argv[1:]
    for position, word in enumerate(words):
        if word == "--nproc":
            del words[position : position + 2]
            break
        if word.startswith("--nproc="):
            del words[position]
            break
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    environment = {"OMP_NUM_THREADS": "1"} if "OMP_NUM_THREADS" not in os.environ else {}
    try:
        return run_to_the_end([*command, "-m", "megatron_fssdp", *words], environment, None, lambda: None)
    except KeyboardInterrupt as interrupt:
        print("interrupted; all ranks have ended", file=sys.stderr)
        return exit_code_after(interrupt)


def _check_writable(path: Path) -> None:
    refuse_special_file(path, "--out")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--out {path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"--out {path}: cannot be written; choose another file")
