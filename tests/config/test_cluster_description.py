import pytest

from megatron_fssdp.config.cluster_description import FittedLink, cluster_yaml, load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.yaml_text import format_yaml

EXAMPLE = load_cluster("hecate-a")


@pytest.mark.parametrize("name", ["pair", "§ 1: '#'", "2", "null"])
def test_a_written_description_is_read_back(tmp_path, name):
    link = FittedLink(alpha_s=1e-7, bandwidth_bytes_per_s=3e18, r_squared=-0.5)
    changes = {"name": name, "memory_bytes": 1 << 50, "sources": {"intra_node": "π: measured"}}
    description = EXAMPLE.model_copy(update={**changes, "collectives": {"broadcast": {"inter_node": link}}})
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_yaml(description, "two\nlines"), encoding="utf-8")
    assert path.read_text(encoding="utf-8").startswith("# two\n# lines\nname:")
    assert load_cluster(path) == description


def test_files_of_an_older_profile_are_refused_with_the_next_step(tmp_path):
    path = tmp_path / "old.yaml"
    values = EXAMPLE.model_dump(mode="json", exclude={"inter_device"}, exclude_none=True)
    path.write_text(format_yaml(values), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"^.*old.yaml: inter_device is missing.*profile again.*$"):
        load_cluster(path)


def test_cluster_names_are_found_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs" / "clusters"
    folder.mkdir(parents=True)
    (folder / "pair.yaml").write_text(cluster_yaml(EXAMPLE), encoding="utf-8")
    assert load_cluster("pair") == EXAMPLE
    with pytest.raises(ConfigurationError, match=r"unknown cluster 'piar'; did you mean 'pair'\?.*path of"):
        load_cluster("piar")
