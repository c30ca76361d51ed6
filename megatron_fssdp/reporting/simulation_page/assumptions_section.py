"""Page section on everything that a simulation assumes: the cluster, the job, and what is left out."""

from megatron_fssdp.config.cluster_description import ClusterDescription, LinkDescription
from megatron_fssdp.reporting.html.section import Section, Table
from megatron_fssdp.reporting.simulation_report import SimulationReport
from megatron_fssdp.reporting.units import format_bytes, format_memory
from megatron_fssdp.simulation.moe_job import MoeJob


def assumptions_section(report: SimulationReport, cluster: ClusterDescription, job: MoeJob) -> Section:
    """Make the section with a table of the cluster's and the job's figures, and the simulation's notes.

    Args:
        report: Results of the simulation.
        cluster: Cluster on which the loads were simulated.
        job: Training job whose sizes were simulated.
    """
    rows = (*_cluster_rows(cluster), *_job_rows(job))
    table = Table(("", "value", "source"), rows, prose=frozenset(("value", "source")))
    lead = (
        "The results are as good as these figures. The source of a cluster's figure is the paper, the data "
        "sheet or the assumption that its description names; “megatron-fssdp profile” measures a cluster "
        "instead."
    )
    notes = tuple(f"{note[0].upper()}{note[1:].rstrip('.')}." for note in report.notes)
    return Section("assumptions", "What is assumed", lead, table=table, notes=notes)


def _cluster_rows(cluster: ClusterDescription) -> list[tuple[str, ...]]:
    figures = {
        "num_nodes": ("nodes", f"{cluster.num_nodes}"),
        "devices_per_node": ("devices of a node", f"{cluster.devices_per_node}"),
        "intra_node": ("link of a device inside its node", _link(cluster.intra_node)),
        "inter_node": ("all network links of a node together", _link(cluster.inter_node)),
        "expert_flops_per_s": ("compute of experts", _flops(cluster.expert_flops_per_s)),
        "non_expert_flops_per_s": ("compute of attention", _flops(cluster.non_expert_flops_per_s)),
        "memory_bytes": (
            "memory of a device",
            "unknown" if cluster.memory_bytes is None else format_memory(cluster.memory_bytes),
        ),
    }
    rows: list[tuple[str, ...]] = [
        (*words, cluster.sources.get(key, cluster.name)) for key, words in figures.items()
    ]
    for name, classes in cluster.collectives.items():
        for link_class, link in classes.items():
            rows.append((f"{name}, {link_class}", _link(link), f"measured, {cluster.name}"))
    return rows


def _job_rows(job: MoeJob) -> list[tuple[str, ...]]:
    sizes = {
        "devices of an expert-parallel group": f"{job.num_devices}",
        "MoE layers": f"{job.num_layers}",
        "experts of a layer": f"{job.num_experts}, {job.top_k} for each token",
        "weights of an expert": format_bytes(job.expert_bytes),
        "tokens of a device": (
            f"{job.tokens_per_micro_batch:,.0f} in each of {job.num_micro_batches} "
            f"micro-batch{'es' if job.num_micro_batches > 1 else ''}"
        ),
        "hidden state of a token": format_bytes(job.token_bytes),
    }
    return [(name, value, "the run's settings") for name, value in sizes.items()]


def _link(link: LinkDescription) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:,.3g} GB/s, {1e6 * link.alpha_s:,.3g} µs to start"


def _flops(flops_per_s: float) -> str:
    scale, word = (1e12, "TFLOP/s") if flops_per_s >= 1e11 else (1e9, "GFLOP/s")
    return f"{flops_per_s / scale:,.3g} {word}"
