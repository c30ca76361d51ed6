"""Loads that no run of this package recorded: Megatron's traces, and counts of one's own."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_fssdp.cli.app import app
from megatron_fssdp.config.errors import ConfigurationError
from tests.support.python_process import ROOT

from ...records.made_traces import write_tokens_per_expert, write_traces
from ...report.page_parts import PageParts

CLUSTER = ("--cluster", str(ROOT / "configs/clusters/hpwnv.yaml"))
ONE_NODE = ("--cluster-set", "num_nodes=1", "--cluster-set", "devices_per_node=2")
SIZES = """
    model.num_layers=2 model.num_experts=4 parallelism.expert_model_parallel_size=2
    parallelism.nproc_per_node=2 training.micro_batch_size=64 training.global_batch_size=256
"""
MODEL = ("--model", f"{ROOT}/examples/traced_loads/model.yaml", *(f"--set={size}" for size in SIZES.split()))


def command(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def sources(folder):
    """The same loads of two layers and four experts in every form; the last ones lack source devices."""
    counts_ILDE = write_traces(folder / "traces", [1, 1], 2, passes=(3, 3, 3))
    np.save(folder / "counts.npy", counts_ILDE)
    rows = [f"{i},{n},{d},{e},{tokens}" for (i, n, d, e), tokens in np.ndenumerate(counts_ILDE)]
    (folder / "counts.csv").write_text("\n".join(["iteration,layer,device,expert,tokens", *rows]))
    np.save(folder / "sums.npy", counts_ILDE.sum(axis=2))
    return [folder / name for name in ("traces", "counts.npy", "counts.csv", "sums.npy")]


def test_all_forms_of_the_same_loads_are_simulated_alike_and_have_a_page(tmp_path):
    results = []
    for path in sources(tmp_path):
        words = ("--loads", path, *CLUSTER, *ONE_NODE, *MODEL, "--no-plots", "--out", tmp_path / "out")
        output = command("simulate", *words)
        ranking = json.loads((tmp_path / "out" / "ranking.json").read_text())
        results.append({row["strategy"]: row["iteration_s"] for row in ranking["strategies"]})
        assert ("of 4 ranks, pipeline stages: 2, devices of each: 2" in output) == path.is_dir()
        page = tmp_path / f"{path.name}.html"
        output = command("report", path, *MODEL, "--out", page)
        assert f"{path.name}: 3 iterations, 2 MoE layers, 4 experts; busiest of 2 devices 1." in output
        shown = PageParts(page.read_text())
        assert shown.anchors == ["device-load", "expert-load-over-iterations"]
        assert len(shown.figures["device-load"]) == 2
    assert results[0] == results[1] == results[2]
    assert results[3]["ep"] == pytest.approx(results[0]["ep"], rel=0.2)
    write_tokens_per_expert(tmp_path / "save", [2], 2, 1)
    result = json.loads(command("report", tmp_path / "save", *MODEL, "--json"))
    assert result["page"] == str(tmp_path / "save" / "report.html")


def test_a_file_or_folder_of_ones_own_may_be_named_as_a_record(tmp_path):
    np.save(tmp_path / "loads.npy", write_traces(tmp_path / "traces", [1, 1], 2, passes=(3, 3, 3)))
    (tmp_path / "own").mkdir()
    shutil.copy(tmp_path / "loads.npy", tmp_path / "own")
    for name in ("metrics.jsonl", "report.html"):  # of a run in the same folder
        (tmp_path / name).write_text("a run's")
    for source, page in (("loads.npy", "loads.html"), ("own", "own/report.html")):
        assert "3 iterations, 2 MoE layers, 4 experts" in command("report", tmp_path / source, *MODEL)
        assert PageParts((tmp_path / page).read_text()).anchors
    assert (tmp_path / "report.html").read_text() == "a run's"


@pytest.mark.parametrize("verb", ["simulate", "report"])
def test_what_is_wrong_is_told_before_anything_is_written(verb, tmp_path):
    write_traces(tmp_path / "traces", [2], 2)
    file = tmp_path / "traces" / "router_trace_rank1.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    (tmp_path / "x.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    for source, model, words in (
        ("traces", MODEL, "rank1.jsonl: line 12: "),
        ("traces", (), "--model: .*has no config.yaml"),
        ("x.json", MODEL, "is another file, wanted .npy, .npz or .csv"),
    ):
        more = (*CLUSTER, *ONE_NODE, "--out", tmp_path / "out") if verb == "simulate" else ()
        loads = ("--loads", tmp_path / source) if verb == "simulate" else (tmp_path / source,)
        with pytest.raises(ConfigurationError, match=words) as caught:
            command(verb, *loads, *model, *more)
        assert len(str(caught.value).splitlines()) == 1
        assert sorted(tmp_path.rglob("*")) == before


def test_a_recorded_run_has_a_model_of_its_own(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    for option, words in (("--model", MODEL), ("--set", ("--set", "training.seed=3"))):
        with pytest.raises(ConfigurationError, match=rf"{option}: .*describes its model"):
            command("report", tmp_path, *words)
    (tmp_path / "config.yaml").write_text("strategy:\n  name: none\n")  # all that some hosts' records have
    with pytest.raises(ConfigurationError, match=r"--model: .*has no config.yaml that describes the model"):
        command("simulate", "--loads", tmp_path, *CLUSTER, "--out", tmp_path / "out")
