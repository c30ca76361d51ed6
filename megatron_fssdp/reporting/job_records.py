"""Loads to simulate with: a run's record, or a workload made for the job."""

from pathlib import Path

import numpy as np

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import unknown_name
from megatron_fssdp.reporting.run_records import LOADS_FILE, RecordedLoads, read_loads
from megatron_fssdp.simulation.job_loads import fitted_loads, generated_loads
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.workloads import WORKLOADS

GENERATED_ITERATIONS = 20
"""Of a workload, if nobody says how many."""


def loads_for_job(
    source: str, job: MoeJob, num_iterations: int | None = None, seed: int = 0
) -> tuple[RecordedLoads, str]:
    """Loads at the size of a job.

    Args:
        source: Folder of a run, its ``loads.npz``, or the name of a workload.
        job: For its sizes.
        num_iterations: How many to generate, or the most to take of a record.
        seed: Of generated loads.

    Returns:
        The loads, and what has to be said of them; empty for a record as it is.

    Raises:
        ConfigurationError: There is no such run or workload, or it does not fit the job.
    """
    if source in WORKLOADS:
        count = num_iterations or GENERATED_ITERATIONS
        loads = RecordedLoads(
            generated_loads(source, job, count, seed),
            np.arange(1, count + 1),
            np.arange(1, job.num_layers + 1),
        )
        return loads, f"loads generated: {source}, {WORKLOADS[source].description}"
    path = Path(source)
    if not path.exists():
        raise ConfigurationError(
            f"--loads: {unknown_name('workload or run', source, WORKLOADS)}; or give the folder of a run"
        )
    found = read_loads(path.parent if path.name == LOADS_FILE else path)
    most = num_iterations or len(found.iterations)
    counts, factor = fitted_loads(found.counts_ILDE[:most], job)
    note = "" if factor == 1.0 else f"tokens scaled by {factor:.4g} to the model's batch"
    return RecordedLoads(counts, found.iterations[:most], found.layers), note
