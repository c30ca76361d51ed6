"""``megatron-fssdp profile``: measures a cluster and writes the YAML that describes it."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_fssdp.cli.shared_options import Paths, run_files
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files.written_files import refuse_foreign, refuse_unwritable, written_file

if TYPE_CHECKING:
    from megatron_fssdp.megatron_adapter.diagnosis.cluster_profiler import ProfileSettings

_HEADER = "Written by megatron-fssdp profile. Units: seconds, bytes, flops."
_LEAST_R_SQUARED = 0.95
"""Fits with a lower R² are named: their times are not on a line, mostly because other programs ran."""
_AGAIN = "Measure again with nothing else running, with more repetitions or larger messages."


def profile_command(
    out: Annotated[Path, typer.Option(help="YAML file to write.", metavar="CLUSTER.yaml")],
    nproc: Annotated[
        int | None, typer.Option(help="Number of ranks to start on this machine. Not under torchrun.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of equal nodes, in the order of ranks. Default: torchrun's machines."
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Communication backend, gloo or nccl. Default: nccl if there are CUDA devices."),
    ] = None,
    model: Annotated[Paths, run_files("the run whose layers are measured.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the cluster. Default: the name of the file.")
    ] = None,
    least_bytes: Annotated[int, typer.Option(help="Smallest message, in bytes.")] = 1 << 10,
    most_bytes: Annotated[int, typer.Option(help="Largest message, in bytes.")] = 1 << 24,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Number of measurements of each value. Their median counts.")
    ] = 7,
) -> None:
    """Measure links and compute of a cluster, and write its description for simulate.

    The command measures the ranks that torchrun started. With --nproc it starts ranks on this machine.
    """
    from megatron_fssdp.config.cluster_description import cluster_yaml
    from megatron_fssdp.config.run.composition import load_run
    from megatron_fssdp.megatron_adapter.diagnosis.cluster_profiler import ProfileSettings, profile_cluster

    run = load_run(model) if model else None
    sizes = {"least_bytes": least_bytes, "most_bytes": most_bytes, "num_repetitions": repetitions}
    settings = ProfileSettings(name or out.stem, nodes, backend, run, **sizes)
    _check_ranks(settings, nproc)
    is_writer = os.environ.get("RANK", "0") == "0"  # or starts the rank that writes the file
    if is_writer:
        refuse_foreign(out, "--out", f"# {_HEADER}".encode())
        refuse_unwritable(out, "--out")
    if nproc is not None:
        raise typer.Exit(_start_ranks(nproc))
    cluster = profile_cluster(settings, lambda line: print(line, flush=True))
    if is_writer:
        with written_file(out, "--out") as partial:
            partial.write_text(cluster_yaml(cluster, _HEADER), encoding="utf-8")
        doubtful = [
            f"{collective} {where}"
            for collective, links in cluster.collectives.items()
            for where, link in links.items()
            if link.r_squared is not None and link.r_squared < _LEAST_R_SQUARED
        ]
        if doubtful:
            print(f"R² under {_LEAST_R_SQUARED}: {', '.join(doubtful)}. {_AGAIN}")
        print(f"wrote {out}", flush=True)


def _check_ranks(settings: "ProfileSettings", nproc: int | None) -> None:
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if under_torchrun and nproc is not None:
        reason = "torchrun has already started the ranks; remove this option"
        raise ConfigurationError(f"--nproc {nproc}: {reason}")
    if not under_torchrun and nproc is None:
        raise ConfigurationError(
            "no ranks to measure; give --nproc N, or start the command with "
            "torchrun --nproc-per-node N -m megatron_fssdp profile --out FILE.yaml"
        )
    settings.check_ranks(int(os.environ["WORLD_SIZE"]) if nproc is None else nproc)


def _start_ranks(nproc: int) -> int:
    from megatron_fssdp.launch.rank_processes import exit_code_after, run_to_the_end

    words = sys.argv[1:]
    at = next(at for at, word in enumerate(words) if word.partition("=")[0] == "--nproc")
    del words[at : at + (1 if "=" in words[at] else 2)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    try:
        return run_to_the_end([*command, "-m", "megatron_fssdp", *words], environment)
    except KeyboardInterrupt as interrupt:
        print("interrupted; all ranks have ended", file=sys.stderr)
        return exit_code_after(interrupt)
