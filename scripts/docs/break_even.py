"""Simulates for which jobs a strategy pays: the figures of docs/scale.md.

usage: python scripts/docs/break_even.py FOLDER       (half a minute; writes results into an existing folder)

``tables.py`` makes the page's tables from these files. Four MoE layers stand for all layers of a model.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Another checkout may be installed, but the numbers must be those of this one.
sys.path.insert(0, str(ROOT))

from benchmarks.result_file import write_result  # noqa: E402
from megatron_fssdp.config.cluster_description import ClusterDescription, load_cluster  # noqa: E402
from megatron_fssdp.config.run.composition import load_run  # noqa: E402
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES  # noqa: E402
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings  # noqa: E402
from megatron_fssdp.simulation.break_even import BreakEven, break_evens  # noqa: E402
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run  # noqa: E402
from megatron_fssdp.simulation.simulator import StrategyOutcome, device_memory, simulate  # noqa: E402
from megatron_fssdp.simulation.workloads import generated_loads  # noqa: E402

NAMES = ("fssdp", "prophet", "quota", "fastermoe", "flexmoe", "smartmoe")
RARE = ("flexmoe", "smartmoe")
"""They act every 25 iterations, and a search simulates only a few."""
UNEVEN = "lognormal-medium"
"""The workload under which break-even values are searched."""
WORKLOADS = {"W0": "balanced", UNEVEN: "uneven, steady", "W3": "one hot expert", "W6": "moving hot device"}
ITERATIONS, WARM_UP = 100, 26
SAMPLE, PAST = 6, 16
"""Iterations that a search simulates, and iterations before them."""
GIB = 2**30


@dataclass(frozen=True)
class Example:
    """A model on a cluster, with the batch of a rank and of all, and at most ``slots`` replicas."""

    name: str
    model: str
    cluster: str
    batch: tuple[int, int]
    overrides: tuple[str, ...] = ()
    slots: int | None = None
    few_layers: tuple[str, ...] = ("model.num_layers=4",)

    def job(self, *more: str) -> MoeJob:
        """The job, with further overrides."""
        parts = (f"models/{self.model}", f"parallelism/{self.cluster}", "training/measure")
        sizes = zip(("micro", "global"), self.batch, strict=True)
        batch = [f"training.{which}_batch_size={size}" for which, size in sizes]
        return job_of_run(load_run([Path(part) for part in parts], (*batch, *self.overrides, *more)))


EXAMPLES = (
    Example("gpt-moe-s", "hecate-gpt-moe-s", "hecate-a", (4, 128)),
    Example(
        "qwen3-30b-a3b",
        "qwen3-30b-a3b",
        "h200",
        (1, 256),
        ("parallelism.expert_model_parallel_size=32", "model.seq_length=2048"),
        slots=4,
    ),
    Example(
        "deepseekmoe-16b",
        "deepseekmoe-16b",
        "h200",
        (1, 128),
        slots=8,
        few_layers=("model.num_layers=5", "model.moe_layer_freq=[0, 1, 1, 1, 1]"),  # the first one is dense
    ),
)


def even_bytes(job: MoeJob, cluster: ClusterDescription) -> int:
    """Bytes of a device without replicas and with even loads."""
    return device_memory(job, cluster).total_bytes


def settings_of(example: Example, name: str) -> StrategySettings:
    """A strategy's default settings, but for the example's slots."""
    model = STRATEGIES[name].settings
    has_slots = example.slots is not None and "slots" in model.model_fields
    return model.model_validate({"slots": example.slots} if has_slots else {})


def table_of(example: Example) -> tuple[list[str], list[list[object]]]:
    """Columns and rows of one example; loads under which even ``ep`` does not fit are left out."""
    whole, job, cluster = example.job(), example.job(*example.few_layers), load_cluster(example.cluster)
    capacity = cluster.memory_bytes or 0
    # Replicas and uneven loads add to every layer, so the simulated layers get their part of what is free.
    times, base, few_base = (
        whole.num_layers / job.num_layers,
        even_bytes(whole, cluster),
        even_bytes(job, cluster),
    )
    cluster = cluster.model_copy(update={"memory_bytes": int(few_base + (capacity - base) / times)})
    loads = {name: generated_loads(name, job, ITERATIONS) for name in WORKLOADS}

    def simulated(name: str, load: str) -> StrategyOutcome:
        return simulate(name, settings_of(example, name), loads[load], cluster, job)

    plain = {load: simulated("ep", load) for load in WORKLOADS}
    fitting = [load for load in WORKLOADS if not plain[load].memory.runs_out]
    columns = ["strategy", *(f"{WORKLOADS[load]} ({load})" for load in fitting)]
    columns += [f"memory, GiB of {capacity / GIB:.0f}", "pays from, tokens per rank"]
    rows, spans_nodes = [], False
    for name in NAMES:
        outcomes = {load: simulated(name, load) for load in fitting}
        row: list[object] = [name]
        for load, one in outcomes.items():
            speed = plain[load].iteration_s[WARM_UP:].mean() / one.iteration_s[WARM_UP:].mean()
            row.append("does not fit" if one.memory.runs_out else round(float(speed), 2))
        most = max(one.memory.total_bytes for one in outcomes.values())
        row.append(round((base + times * (most - few_base)) / GIB))
        limits: tuple[BreakEven | None, BreakEven | None] = (None, None)
        if name not in RARE and not outcomes[UNEVEN].memory.runs_out:
            past_ILDE, now_ILDE = loads[UNEVEN][-SAMPLE - PAST : -SAMPLE], loads[UNEVEN][-SAMPLE:]
            limits = break_evens(
                name, settings_of(example, name), now_ILDE, cluster, job, past_ILDE=past_ILDE
            )
            spans_nodes = spans_nodes or limits[1] is not None
        rows.append([*row, limit(limits[0], 1.0), limit(limits[1], 8e-9)])
    if not spans_nodes:
        return columns, [row[:-1] for row in rows]
    return [*columns, "pays up to, Gb/s per node"], rows


def limit(found: BreakEven | None, unit: float) -> object:
    """A break-even value in a unit, to two digits."""
    if found is None or found.value is not None:
        return None if found is None else round(float(f"{found.value * unit:.2g}"))
    return "always" if found.pays_now else "never"


if __name__ == "__main__":
    for example in EXAMPLES:
        columns, rows = table_of(example)
        question = f"Which strategy pays for {example.name}, and from which size on (over ep)?"
        write_result(Path(sys.argv[1]) / f"simulator-break-even-{example.name}.json", question, columns, rows)
