"""Shows a measured cluster as a table for the terminal."""

from rich import box
from rich.table import Table

from megatron_fssdp.config.cluster_description import ClusterDescription, FittedLink, LinkDescription

LEAST_R_SQUARED = 0.95
"""Fits with a lower R² are reported.

Their times are not on a line, mostly because other programs were running.
"""


def cluster_table(cluster: ClusterDescription) -> Table:
    """Return a table of links, collectives and compute.

    Args:
        cluster: Description of the cluster. Values that were not measured are left out.
    """
    compute = [
        f"{label} {flops_per_s / 1e9:,.1f} GFLOP/s"
        for label, flops_per_s in (
            ("experts", cluster.expert_flops_per_s),
            ("attention", cluster.non_expert_flops_per_s),
        )
    ]
    if cluster.memory_bytes is not None:
        compute.append(f"memory {cluster.memory_bytes / 2**30:,.1f} GiB")
    title = f"{cluster.name}: {cluster.num_nodes} × {cluster.devices_per_node} devices; {', '.join(compute)}"
    table = Table(
        title=title,
        title_justify="left",
        caption=_doubts(cluster),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("measured", no_wrap=True)
    for heading in ("link", "start-up µs", "GB/s", "R²", "worst error"):
        table.add_column(heading, justify="left" if heading == "link" else "right", no_wrap=True)
    for link_class, link in (("intra_node", cluster.intra_node), ("inter_node", cluster.inter_node)):
        owner = "one device" if link_class == "intra_node" else "one node"
        table.add_row(f"link of {owner}", link_class, *_figures(link))
    for name, classes in cluster.collectives.items():
        for link_class, link in classes.items():
            table.add_row(name, link_class, *_figures(link))
    return table


def _figures(link: LinkDescription) -> list[str]:
    figures = [f"{link.alpha_s * 1e6:,.1f}", f"{link.bandwidth_bytes_per_s / 1e9:,.3f}"]
    if isinstance(link, FittedLink) and link.r_squared is not None and link.worst_relative_error is not None:
        figures += [f"{link.r_squared:.4f}", f"{link.worst_relative_error:.0%}"]
    return figures


def _doubts(cluster: ClusterDescription) -> str | None:
    bad = [
        f"{name} {link_class}"
        for name, classes in cluster.collectives.items()
        for link_class, link in classes.items()
        if link.r_squared is not None and link.r_squared < LEAST_R_SQUARED
    ]
    if not bad:
        return None
    return (
        f"R² under {LEAST_R_SQUARED}: {', '.join(bad)}. Measure again with nothing else running, with more "
        "repetitions or larger messages."
    )
