"""Cluster descriptions are written to files and read back."""

from pathlib import Path

import pytest

from megatron_fssdp.config.cluster_description import ClusterDescription, FittedLink, LinkDescription
from megatron_fssdp.config.cluster_files import cluster_yaml, load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.shipped_files import known_clusters

EXAMPLE = ClusterDescription(
    name="pair",
    num_nodes=2,
    devices_per_node=1,
    intra_node=LinkDescription(alpha_s=1e-5, bandwidth_bytes_per_s=1e10),
    inter_node=LinkDescription(alpha_s=1e-5, bandwidth_bytes_per_s=1e9),
    expert_flops_per_s=1e12,
    non_expert_flops_per_s=1e12,
)


@pytest.mark.parametrize("name", known_clusters())
def test_a_written_description_is_read_back(tmp_path: Path, name: str) -> None:
    path, measured = tmp_path / "cluster.yaml", FittedLink(alpha_s=1e-30, bandwidth_bytes_per_s=1e18)
    collectives = {"all_to_all": {"intra_node": measured}}
    update = {"collectives": collectives, "sources": {"intra_node": "ab: #'§,π"}}
    description = load_cluster(name).model_copy(update=update)
    path.write_text(cluster_yaml(description, "two\nlines"), encoding="utf-8")
    assert path.read_text(encoding="utf-8").startswith("# two\n# lines\nname:")
    assert load_cluster(path) == description


def test_cluster_names_are_found_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs" / "clusters"
    folder.mkdir(parents=True)
    (folder / "pair.yaml").write_text(cluster_yaml(EXAMPLE), encoding="utf-8")
    assert load_cluster("pair") == EXAMPLE
    with pytest.raises(ConfigurationError, match=r"unknown cluster 'piar'; did you mean 'pair'\?.*path of"):
        load_cluster("piar")


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    with pytest.raises(ConfigurationError, match=r"bad.yaml: no such file"):
        load_cluster(path)
    path.write_text(cluster_yaml(EXAMPLE).replace("num_nodes: 2", "num_nodes: none"), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"bad.yaml: num_nodes: got 'none' .*wanted a whole number"):
        load_cluster(path)
