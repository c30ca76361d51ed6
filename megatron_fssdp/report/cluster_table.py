"""Shows a measured cluster as a table for the terminal."""

from rich.table import Table as TerminalTable

from megatron_fssdp.config.cluster_description import ClusterDescription, FittedLink, LinkDescription
from megatron_fssdp.report.tables import Table, terminal_table
from megatron_fssdp.report.units import format_flops, format_memory

_LEAST_R_SQUARED = 0.95
"""Fits with a lower R² are reported: their times are not on a line, mostly because other programs ran."""


def cluster_table(cluster: ClusterDescription) -> TerminalTable:
    """Return a table of links, collectives and compute. Values that were not measured are left out."""
    compute = f"experts {format_flops(cluster.expert_flops_per_s)}, attention "
    compute += format_flops(cluster.non_expert_flops_per_s)
    if cluster.memory_bytes is not None:
        compute += f", memory {format_memory(cluster.memory_bytes)}"
    links: list[tuple[str, str, LinkDescription]] = [
        ("link of one device", "intra_node", cluster.intra_node),
        ("link of one node", "inter_node", cluster.inter_node),
    ]
    for collective, classes in cluster.collectives.items():
        links += [(collective, link_class, link) for link_class, link in classes.items()]
    rows, doubtful = [], []
    for name, link_class, link in links:
        fit = ("", "")
        if (
            isinstance(link, FittedLink)
            and link.r_squared is not None
            and link.worst_relative_error is not None
        ):
            fit = (f"{link.r_squared:.4f}", f"{link.worst_relative_error:.0%}")
            doubtful += [f"{name} {link_class}"] if link.r_squared < _LEAST_R_SQUARED else []
        speed = f"{link.bandwidth_bytes_per_s / 1e9:,.3f}"
        rows.append((name, link_class, f"{link.alpha_s * 1e6:,.1f}", speed, *fit))
    doubts = (
        f"R² under {_LEAST_R_SQUARED}: {', '.join(doubtful)}. Measure again with nothing else running, with "
        "more repetitions or larger messages."
    )
    header = ("measured", "link", "start-up µs", "GB/s", "R²", "worst error")
    return terminal_table(
        Table(header, tuple(rows), frozenset(("link",))),
        f"{cluster.name}: {cluster.num_nodes} × {cluster.devices_per_node} devices; {compute}",
        doubts if doubtful else "",
        whole=header,
    )
