"""Shows a measured cluster as a table for the terminal."""

from rich.table import Table as TerminalTable

from megatron_fssdp.config.cluster_description import ClusterDescription, FittedLink, LinkDescription
from megatron_fssdp.report.tables import Table, terminal_table
from megatron_fssdp.report.units import format_flops, format_memory

_LEAST_R_SQUARED = 0.95
"""Fits with a lower R² are reported.

Their times are not on a line, mostly because other programs were running.
"""


def cluster_table(cluster: ClusterDescription) -> TerminalTable:
    """Return a table of links, collectives and compute. Values that were not measured are left out."""
    compute = f"experts {format_flops(cluster.expert_flops_per_s)}, attention "
    compute += format_flops(cluster.non_expert_flops_per_s)
    if cluster.memory_bytes is not None:
        compute += f", memory {format_memory(cluster.memory_bytes)}"
    rows = [
        _row(f"link of one {owner}", link_class, link)
        for owner, link_class, link in (
            ("device", "intra_node", cluster.intra_node),
            ("node", "inter_node", cluster.inter_node),
        )
    ]
    doubtful = []
    for name, classes in cluster.collectives.items():
        for link_class, link in classes.items():
            rows.append(_row(name, link_class, link))
            if link.r_squared is not None and link.r_squared < _LEAST_R_SQUARED:
                doubtful.append(f"{name} {link_class}")
    doubts = (
        f"R² under {_LEAST_R_SQUARED}: {', '.join(doubtful)}. Measure again with nothing else running, with "
        "more repetitions or larger messages."
        if doubtful
        else ""
    )
    header = ("measured", "link", "start-up µs", "GB/s", "R²", "worst error")
    return terminal_table(
        Table(header, tuple(rows), frozenset(("link",))),
        f"{cluster.name}: {cluster.num_nodes} × {cluster.devices_per_node} devices; {compute}",
        doubts,
        whole=header,
    )


def _row(name: str, link_class: str, link: LinkDescription) -> tuple[str, ...]:
    fit = ("", "")
    if isinstance(link, FittedLink) and link.r_squared is not None and link.worst_relative_error is not None:
        fit = (f"{link.r_squared:.4f}", f"{link.worst_relative_error:.0%}")
    speed = f"{link.bandwidth_bytes_per_s / 1e9:,.3f}"
    return (name, link_class, f"{link.alpha_s * 1e6:,.1f}", speed, *fit)
