"""Print the Markdown tables of docs/scale.md, computed by the simulator; takes some minutes.

usage: python scripts/docs/scale_table.py [MODEL…]           (without MODEL: all models)
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.simulation.job_loads import generated_loads
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run
from megatron_fssdp.simulation.simulator import StrategyOutcome, simulate

STRATEGY_NAMES = ("ep", "fssdp", "prophet", "fastermoe", "quota", "flexmoe", "smartmoe", "auto")
CLUSTER = "h200"
WORKLOAD = "lognormal-weak"
TOKENS = 1024
"""Tokens of a device in a micro-batch: a sequence of 4,096 tokens on four context-parallel devices."""
DEVICES = (64, 512, 4096)
ITERATIONS, PAST = 30, 4
"""Simulated iterations, and iterations before them. FlexMoE and SmartMoE act after 25 iterations."""


@dataclass(frozen=True)
class Model:
    """A model in pipeline stages.

    Attributes:
        title: Name of the model.
        file: Name of its file in ``configs/models``.
        num_stages: Number of pipeline stages.
        num_layers: Number of MoE layers of a stage.
        micro_batches: Number of micro-batches of an iteration.
    """

    title: str
    file: str
    num_stages: int
    num_layers: int
    micro_batches: int

    def job(self, num_devices: int) -> MoeJob:
        """One pipeline stage of the model on all devices together.

        The devices of a stage are one expert-parallel group, or several if a stage has more devices than
        experts. Dense parameters are divided evenly by stages. As many micro-batches are in flight as there
        are stages, each with the activations of one stage.

        Args:
            num_devices: Number of devices of all stages.
        """
        of_stage = num_devices // self.num_stages
        parts = (f"models/{self.file}", f"parallelism/{CLUSTER}", "training/measure")
        # The batch of the shipped 32 devices; numbers of devices and micro-batches are replaced below.
        batch = ("training.micro_batch_size=1", "training.global_batch_size=32")
        run = load_run([Path(part) for part in parts], batch)
        num_experts = run.model.num_experts
        assert num_experts is not None
        group = min(of_stage, num_experts)
        while num_experts % group:
            group -= 1
        job = job_of_run(run).with_tokens(TOKENS / run.model.seq_length)
        return replace(
            job,
            num_devices=group,
            num_micro_batches=self.micro_batches,
            before_layer_flops_L=(0.0,) * self.num_layers,
            before_gate_flops_L=job.before_gate_flops_L[-self.num_layers :],
            after_layers_flops=0.0,
            dense_elements=job.dense_elements // self.num_stages,
            expert_data_parallel_size=of_stage // group,
            data_parallel_size=of_stage,
            # The stages' parts of a micro-batch add up to the whole model.
            activation_bytes_per_pair=job.activation_bytes_per_pair * self.num_stages,
        )


MODELS = {
    "deepseek-v3": Model("DeepSeek-V3, in 16 pipeline stages of 4 MoE layers", "deepseek-v3", 16, 4, 16),
    "qwen3-235b-a22b": Model(
        "Qwen3-235B-A22B, in 2 pipeline stages of 47 MoE layers", "qwen3-235b-a22b", 2, 47, 8
    ),
}


def cluster_of(num_devices: int) -> ClusterDescription:
    """The shipped description with as many nodes as the devices need."""
    cluster = load_cluster(CLUSTER)
    return cluster.model_copy(update={"num_nodes": max(1, num_devices // cluster.devices_per_node)})


def table(model: Model, num_devices: int) -> str:
    """Return the Markdown table of one model on one number of devices.

    Args:
        model: The model.
        num_devices: Number of devices.
    """
    job, cluster = model.job(num_devices), cluster_of(num_devices)
    head = (
        f"**{model.title}, on {num_devices:,} devices** (EP {job.num_devices} × expert data parallelism "
        f"{job.expert_data_parallel_size}; experts of a layer on a device: "
        f"{job.num_experts // job.num_devices})"
    )
    counts_ILDE = generated_loads(WORKLOAD, job, PAST + ITERATIONS)
    plain = _outcome("ep", counts_ILDE, cluster, job)
    if plain.memory.runs_out:
        return (
            f"{head}: **does not fit**. Under `ep` it needs {_gib(plain)} GiB per device, and a device has "
            f"{(cluster.memory_bytes or 0) / 2**30:.0f} GiB.\n"
        )
    lines = [
        head,
        "",
        "| strategy | seconds | speed over `ep` | GiB per device | host ms | device waits for the host, ms |",
        "|---|---|---|---|---|---|",
    ]
    for name in STRATEGY_NAMES:
        if name == "smartmoe" and job.num_experts == job.num_devices:
            lines.append(f"| `{name}` | – | needs two experts per device | – | – | – |")
            continue
        outcome = plain if name == "ep" else _outcome(name, counts_ILDE, cluster, job)
        if outcome.memory.runs_out:
            lines.append(f"| `{name}` | – | out of memory | {_gib(outcome)} | – | – |")
            continue
        lines.append(
            f"| `{name}` | {outcome.mean_s:.3f} | {plain.mean_s / outcome.mean_s:.2f} | {_gib(outcome)} | "
            f"{1e3 * outcome.host_s:,.0f} | {1e3 * float(outcome.parts_s['host'].mean()):,.0f} |"
        )
    load = plain.load_max_over_mean_IL.mean()
    return "\n".join([*lines, "", f"Device load max/mean under `ep`: {load:.2f}."]) + "\n"


def _outcome(name: str, counts_ILDE: np.ndarray, cluster: ClusterDescription, job: MoeJob) -> StrategyOutcome:
    settings = STRATEGIES[name].settings.model_validate({})
    return simulate(name, settings, counts_ILDE[PAST:], cluster, job, past_ILDE=counts_ILDE[:PAST])


def _gib(outcome: StrategyOutcome) -> str:
    return f"{outcome.memory.total_bytes / 2**30:.0f}"


if __name__ == "__main__":
    for number, chosen in enumerate(sys.argv[1:] or MODELS):
        for index, devices in enumerate(DEVICES):
            print(("\n" if number + index else "") + table(MODELS[chosen], devices), end="", flush=True)
