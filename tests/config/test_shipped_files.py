import pytest

from megatron_fssdp.cli.configs_command import configs_command, shipped_names
from megatron_fssdp.config.cluster_description import load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import compose, load_run
from megatron_fssdp.config.shipped_files import known_clusters, shipped_folder, shipped_run, shipped_runs


@pytest.fixture(autouse=True)
def another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_shipped_file_but_clusters_has_a_name():
    files = {path for path in shipped_folder().rglob("*.yaml") if path.parent.name != "clusters"}
    assert files
    assert set(shipped_runs().values()) == files
    for name in ("gpt_moe_tiny", "gpt_moe_tiny.yaml", "configs/gpt_moe_tiny", "configs/gpt_moe_tiny.yaml"):
        assert load_run([name]) == load_run([shipped_folder() / "gpt_moe_tiny.yaml"])
    for name in ("clusters/hecate-a", "../configs/gpt_moe_tiny", "models", ".", ""):
        assert shipped_run(name) is None


def test_a_users_files_come_before_shipped_ones(tmp_path, capsys):
    (tmp_path / "gpt_moe_tiny.yaml").write_text("data: {vocab_size: 300}\n", encoding="utf-8")
    assert compose(["gpt_moe_tiny.yaml"]).settings == {"data": {"vocab_size": 300}}
    run, shipped = tmp_path / "run.yaml", shipped_run("models/tiny-mixtral")
    run.write_text("include: [models/tiny-mixtral]\n", encoding="utf-8")
    assert shipped is not None
    assert compose([run]).settings == compose([shipped]).settings
    run.write_text("include: [models/tiny-mixtral.yaml]\n", encoding="utf-8")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny-mixtral.yaml").write_text("model: {num_layers: 7}\n", encoding="utf-8")
    assert compose([run]).settings == {"model": {"num_layers": 7}}
    run.rename("h200.yaml")  # a cluster's name
    configs_command(["h200.yaml"])
    assert "num_layers: 7" in capsys.readouterr().out


def test_a_wrong_name_gives_one_line_with_the_closest_name():
    with pytest.raises(ConfigurationError, match=r"^gpt_moe_tny: no .*mean 'gpt_moe_tiny'\?"):
        compose(["gpt_moe_tny"])
    with pytest.raises(ConfigurationError, match=r"^fssdp: no .*mean 'strategies/fssdp'\?"):
        compose(["fssdp"])
    with pytest.raises(ConfigurationError, match=r"^x.yaml: no such file"):
        compose(["x.yaml"])


@pytest.mark.parametrize("name", ["h200", "clusters/h200", "configs/clusters/h200.yaml"])
def test_a_shipped_cluster_is_printed_as_it_is(name, capsys):
    configs_command([name])
    assert capsys.readouterr().out == known_clusters()["h200"].read_text(encoding="utf-8")
    assert load_cluster(name).name == "h200"


def test_the_list_has_a_description_and_a_parameter_count_for_each_file():
    text = shipped_names()
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(lines) == len(shipped_runs()) + len(known_clusters())
    assert all(len(line) > 70 and line.rstrip()[-1] in ".…" for line in lines), text
    (mixtral,) = [line for line in lines if line.split()[0] == "models/mixtral-8x7b"]
    assert "46.7 B (12.9 B a token)" in mixtral
