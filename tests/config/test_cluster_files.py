"""Cluster descriptions are written to files and read back."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from megatron_fssdp.config.cluster_description import ClusterDescription, FittedLink, LinkDescription
from megatron_fssdp.config.cluster_files import cluster_yaml, load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from tests.drawn_examples import examples

SECONDS = st.floats(0, 1, allow_subnormal=False)
RATES = st.floats(1e3, 1e18)
LINKS = st.builds(LinkDescription, alpha_s=SECONDS, bandwidth_bytes_per_s=RATES)
FITTED = st.builds(
    FittedLink,
    alpha_s=SECONDS,
    bandwidth_bytes_per_s=RATES,
    r_squared=st.none() | st.floats(-10, 1),
    worst_relative_error=st.none() | SECONDS,
)
DESCRIPTIONS = st.builds(
    ClusterDescription,
    name=st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1),
    num_nodes=st.integers(1, 512),
    devices_per_node=st.integers(1, 16),
    intra_node=LINKS,
    inter_node=LINKS,
    expert_flops_per_s=RATES,
    non_expert_flops_per_s=RATES,
    memory_bytes=st.none() | st.integers(1, 1 << 50),
    collectives=st.dictionaries(
        st.sampled_from(["all_to_all", "broadcast"]),
        st.dictionaries(st.sampled_from(["intra_node", "inter_node"]), FITTED),
    ),
    sources=st.dictionaries(st.sampled_from(["intra_node", "memory_bytes"]), st.text("ab: #'§,π")),
)
EXAMPLE = ClusterDescription(
    name="pair",
    num_nodes=2,
    devices_per_node=1,
    intra_node=LinkDescription(alpha_s=1e-5, bandwidth_bytes_per_s=1e10),
    inter_node=LinkDescription(alpha_s=1e-5, bandwidth_bytes_per_s=1e9),
    expert_flops_per_s=1e12,
    non_expert_flops_per_s=1e12,
)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DESCRIPTIONS)
def test_a_written_description_is_read_back(tmp_path: Path, description: ClusterDescription) -> None:
    path = tmp_path / "cluster.yaml"
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
    with pytest.raises(ConfigurationError, match=r"bad.yaml: num_nodes: got 'none' .*wanted a valid integer"):
        load_cluster(path)
