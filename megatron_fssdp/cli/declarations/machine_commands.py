"""The options of ``profile`` and ``doctor``."""

from pathlib import Path
from typing import Annotated

import typer


def profile_command(
    out: Annotated[Path, typer.Option(help="YAML file to write.", metavar="CLUSTER.yaml")],
    nproc: Annotated[
        int | None, typer.Option(help="Number of ranks to start on this machine. Not under torchrun.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of equal nodes, in the order of ranks. Default: torchrun's machines."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Communication backend, gloo or nccl. Default: nccl if there are CUDA devices."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="YAML of the run whose layers are measured. Repeatable for parts of a run.",
            metavar="RUN.yaml",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the cluster. Default: the name of the file.")
    ] = None,
    least_bytes: Annotated[int, typer.Option(help="Smallest message, in bytes.")] = 1 << 10,
    most_bytes: Annotated[int, typer.Option(help="Largest message, in bytes.")] = 1 << 24,
    repetitions: Annotated[
        int, typer.Option(help="Number of measurements of each value. Their median counts.")
    ] = 7,
) -> None:
    """Measure links and compute of a cluster, and write its description for simulate and the planners.

    The command measures the ranks that torchrun started. With --nproc it starts ranks on this machine.
    """
    from megatron_fssdp.cli.machine.profile_command import ProfileRequest, profile
    from megatron_fssdp.config.run.composition import load_run
    from megatron_fssdp.megatron_adapter.diagnosis.cluster_profiler import ProfileSettings

    settings = ProfileSettings(
        name=name or out.stem,
        num_nodes=nodes,
        backend=backend,
        model=load_run(model) if model else None,
        least_bytes=least_bytes,
        most_bytes=most_bytes,
        num_repetitions=repetitions,
    )
    raise typer.Exit(profile(ProfileRequest(out, settings, nproc)))


def doctor_command(
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints. Checks if it is writable and has space.", metavar="DIR"),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            help="YAML of a run. Checks if its ranks and checkpoints fit. Repeatable for parts of a run.",
            metavar="CONFIG.yaml",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check whether a training can run on this machine, and say what to do if it cannot."""
    from megatron_fssdp.cli.machine.doctor_command import DoctorRequest, examine

    raise typer.Exit(examine(DoctorRequest(config or (), checkpoints, as_json)))
