"""Print the Markdown tables of docs/performance.md on the deduplicated exchange, computed by the simulator.

usage: python scripts/docs/exchange_table.py [MODEL…]       (without MODEL: all models; takes some minutes)
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from scale_table import Model

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.simulation.job_loads import generated_loads
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import simulate

CLUSTERS = ("h200", "hecate-b", "hecate-a", "hpnv", "parm-b", "johnny", "trevor")
"""Shipped descriptions with several nodes. ``hpwnv`` equals ``hpnv``, and ``lpwnv`` is a small ``parm-b``."""

STRATEGY_NAMES = ("ep", "fssdp", "prophet", "fastermoe", "quota")
BALANCED, SKEWED = "W0", "lognormal-weak"
ITERATIONS, PAST = 4, 4
"""Simulated iterations, and iterations before them."""

SEQUENCES = 4
"""Tokens of a device in a micro-batch, in units of those of docs/scale.md: 4,096 tokens."""

MODELS = {
    "deepseek-v3": Model("DeepSeek-V3, top-8 of 256 experts", "deepseek-v3", 1, 2, 4),
    "qwen3-235b-a22b": Model("Qwen3-235B-A22B, top-8 of 128 experts", "qwen3-235b-a22b", 1, 2, 4),
    "mixtral-8x7b": Model("Mixtral 8x7B, top-2 of 8 experts", "mixtral-8x7b", 1, 2, 4),
}
"""Two MoE layers of each model, four micro-batches in an iteration."""


def table(model: Model) -> Iterator[str]:
    """Give the lines of the Markdown table of one model, with a row for each cluster.

    Args:
        model: The model.
    """
    columns = [f"`ep`, {BALANCED}", *(f"`{name}`" for name in STRATEGY_NAMES), "`fssdp`, `by_price`"]
    yield from (f"**{model.title}**", "", f"| cluster | {' | '.join(columns)} |")
    yield "|---" * (len(columns) + 1) + "|"
    for name in CLUSTERS:
        # Replicas are limited by slots below. Without a size, memory limits nothing else.
        cluster = load_cluster(name).model_copy(update={"memory_bytes": None})
        job = replace(model.job(cluster.num_devices), expert_data_parallel_size=1).with_tokens(SEQUENCES)
        nodes = -(-job.num_devices // cluster.devices_per_node)
        cells = [*_cells(BALANCED, ("ep",), cluster, job), *_cells(SKEWED, STRATEGY_NAMES, cluster, job)]
        yield f"| {name}, {nodes} × {job.num_devices // nodes} | {' | '.join(cells)} |"


def _cells(workload: str, names: tuple[str, ...], cluster: ClusterDescription, job: MoeJob) -> Iterator[str]:
    """Give the speed-ups over ``ep`` with the usual exchange: of each strategy with both, then by price."""
    counts_ILDE = generated_loads(workload, job, PAST + ITERATIONS)

    def seconds(name: str, exchange: str) -> float:
        keys = {"exchange": exchange} | ({} if name == "ep" else {"slots": 2})
        settings = STRATEGIES[name].settings.model_validate(keys)
        past_ILDE: np.ndarray = counts_ILDE[:PAST]
        return simulate(name, settings, counts_ILDE[PAST:], cluster, job, past_ILDE=past_ILDE).mean_s

    plain_s = seconds("ep", "pairs")
    for name in names:
        yield f"{plain_s / seconds(name, 'pairs'):.2f} → {plain_s / seconds(name, 'deduplicated'):.2f}"
    if "fssdp" in names:
        yield f"{plain_s / seconds('fssdp', 'by_price'):.2f}"


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        for line in table(MODELS[chosen]):
            print(line, flush=True)
        print()
