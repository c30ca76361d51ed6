"""The cluster descriptions that come with the project."""

from pathlib import Path

import pytest

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.cluster_files import load_cluster

FOLDER = Path(__file__).parents[2] / "configs" / "clusters"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def test_all_shipped_clusters_are_known() -> None:
    wanted = "h200 hecate-a hecate-b hpnv hpwnv johnny lpwnv parm-a parm-b trevor"
    assert set(wanted.split()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_a_cluster_has_a_source(name: str) -> None:
    cluster = load_cluster(FOLDER / f"{name}.yaml")
    assert cluster.name == name
    figures = set(ClusterDescription.model_fields) - {"name", "sources"}
    given = {figure for figure in figures if getattr(cluster, figure) not in (None, {})}
    assert given <= set(cluster.sources)
    assert cluster.inter_node.bandwidth_bytes_per_s <= (
        cluster.devices_per_node * cluster.intra_node.bandwidth_bytes_per_s
    )
