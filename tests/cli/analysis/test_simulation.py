import csv
import json

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.loads import LoadsWriter
from megatron_fssdp.report.colours import TIME_PARTS
from megatron_fssdp.report.units import format_memory
from tests.support.python_process import ROOT

from ...report.page_parts import PageParts, unpacked
from .test_other_loads import command

TINY = ROOT / "configs" / "gpt_moe_tiny.yaml"
BIG = ("--set", "training.micro_batch_size=64", "--set", "training.global_batch_size=256")


def simulate(out, loads, *more):
    words = ("simulate", "--loads", loads, "--cluster", ROOT / "configs/clusters/hpwnv.yaml")
    return command(*words, "--cluster-set", "devices_per_node=2", "--model", TINY, "--out", out, *more)


def test_a_workload_is_simulated_end_to_end(tmp_path):
    output = simulate(tmp_path, "W3", "--iterations", "8", *BIG)
    assert "simulating fssdp (2 of 2 strategies)\n" in output
    ranking = json.loads((tmp_path / "ranking.json").read_text())
    rows = {row["strategy"]: row for row in ranking["strategies"]}
    assert list(rows) == ["fssdp", "ep"]
    headline = f"Simulated: fssdp is {rows['fssdp']['speedup_over_ep']:.2f} × as fast as ep"
    assert f"\n{headline}" in output
    assert rows["ep"]["speedup_over_ep"] == 1.0
    assert rows["fssdp"]["speedup_over_ep"] > 1.1
    assert rows["fssdp"]["load_max_over_mean"] < rows["ep"]["load_max_over_mean"]
    assert rows["fssdp"]["memory"]["peak_bytes"] > rows["ep"]["memory"]["expert_bytes"]
    assert 0 < rows["ep"]["percent_of_force_balanced"] <= 100
    assert sum(rows["ep"]["parts_s"].values()) == pytest.approx(rows["ep"]["iteration_s"])
    with (tmp_path / "iterations.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 16
    assert {line["replicas"] for line in lines if line["strategy"] == "ep"} == {"0"}
    seconds = [float(line["iteration_s"]) for line in lines if line["strategy"] == "fssdp"]
    assert ranking["warm_up_iterations"] == rows["fssdp"]["warm_up_iterations"] == 1
    assert np.mean(seconds[1:]) == pytest.approx(rows["fssdp"]["iteration_s"])
    assert "simulation.html (open it in a browser), tables" in output
    page = PageParts((tmp_path / "simulation.html").read_text())
    sections = "ranking each-iteration expert-load-over-iterations memory what-is-assumed"
    assert page.anchors == sections.split()
    assert headline in page.summary
    traces = page.figures["ranking"][0]["data"]
    shown_s = sum(np.array(trace["x"]) for trace in traces)
    assert traces[0]["y"] == ["fssdp", "ep", "force-balanced"]
    wanted_s = [rows[name]["iteration_s"] for name in ("fssdp", "ep")]
    np.testing.assert_allclose(shown_s, [*wanted_s, ranking["force_balanced_s"]])
    assert {trace["marker"]["color"] for trace in traces} <= {part.colour for part in TIME_PARTS.values()}
    course, _, moved = page.figures["each-iteration"]
    times = {trace["name"]: unpacked(trace["y"]) for trace in course["data"]}
    np.testing.assert_allclose(times["ep"][1:].mean(), rows["ep"]["iteration_s"], rtol=1e-6)
    assert [unpacked(trace["y"]).any() for trace in moved["data"]] == [True, False]
    assert all(format_memory(row["memory"]["peak_bytes"]) in page.texts["memory"] for row in rows.values())
    assert "intra_node.bandwidth_bytes_per_s" in page.texts["what-is-assumed"]
    assert "1.2e+10" in page.texts["what-is-assumed"]
    assert "Pro-Prophet" in page.texts["what-is-assumed"]  # the source of the cluster's figures


def test_a_recorded_run_is_simulated(tmp_path):
    rng = np.random.default_rng(0)
    writer = LoadsWriter(tmp_path / "run", [1, 2, 3, 4])
    for iteration in range(1, 6):
        writer.append(iteration, rng.multinomial(100, np.arange(1, 9) / 36, size=(4, 4)))
    arguments = ("--iterations", "4", "--no-plots", "--moe-strategy-set", "slots=3")
    output = simulate(tmp_path / "out", str(tmp_path / "run"), *arguments)
    assert "loads: tokens scaled by 10.24" in output
    assert "wrote tables to" in output
    with (tmp_path / "out" / "iterations.csv").open(newline="") as file:
        assert [line["iteration"] for line in csv.DictReader(file)] == ["1", "2", "3", "4"] * 2
    assert not (tmp_path / "out" / "simulation.html").exists()


def test_loads_that_change_between_micro_batches_are_simulated(tmp_path):
    more = ("--iterations", "5", "--no-plots", "--strategies", "ep,quota")
    more = (*more, "--set", "training.micro_batch_size=4", "--set", "training.global_batch_size=64")
    simulate(tmp_path / "jump", "jump-micro", *more)
    ranking = json.loads((tmp_path / "jump/ranking.json").read_text())["strategies"]
    rows = {row["strategy"]: row for row in ranking}
    # Of 4 devices; their sum is flatter.
    assert rows["ep"]["load_max_over_mean"] == pytest.approx(2.0, rel=0.02)
    counts_IZLDE = np.random.default_rng(0).integers(1, 9, (5, 4, 4, 4, 8))
    np.savez(tmp_path / "loads.npz", counts_IZLDE=counts_IZLDE)
    assert "tokens scaled" in simulate(tmp_path / "out", str(tmp_path / "loads.npz"), *more)
    np.savez(tmp_path / "loads.npz", counts_ILDE=counts_IZLDE[:, 0])
    with pytest.raises(ConfigurationError, match="got arrays counts_ILDE, wanted counts_IZLDE"):
        simulate(tmp_path / "out", str(tmp_path / "loads.npz"), *more)
    np.save(tmp_path / "loads.npy", counts_IZLDE[:, 0, :, :2])
    output = simulate(tmp_path / "out", str(tmp_path / "loads.npy"), *more)
    assert "loads: source devices of the record 2, of the model 4; tokens scaled" in output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("--cluster-set num_nodes=1", "simulate: .*whole nodes"),
        ("--strategies smartmoe --set model.num_experts=4", "smartmoe: devices own .*two or more on each"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        simulate(tmp_path / "out", "W0", "--no-plots", *changes.split())


def test_a_model_of_several_files_is_simulated(tmp_path):
    (tmp_path / "batch.yaml").write_text("training: {micro_batch_size: 64, global_batch_size: 256}")
    more = ("--iterations", "3", "--no-plots", "--strategies", "ep")
    simulate(tmp_path / "out", "W3", *more, "--model", str(tmp_path / "batch.yaml"))
    ranking = json.loads((tmp_path / "out" / "ranking.json").read_text())
    assert ranking["title"].endswith("gpt_moe_tiny.yaml + batch.yaml")
    simulate(tmp_path / "same", "W3", *more, *BIG)
    assert json.loads((tmp_path / "same" / "ranking.json").read_text())["strategies"] == ranking["strategies"]


def test_the_output_names_settings_that_are_not_defaults(tmp_path):
    (tmp_path / "alg1.yaml").write_text("strategy: {name: fssdp, settings: {planner: hecate}}")
    arguments = ("--iterations", "3", "--no-plots", "--strategies", "ep,fssdp", *BIG)
    printed = simulate(tmp_path / "out", "W3", *arguments, "--model", str(tmp_path / "alg1.yaml"))
    assert "fssdp * " in printed
    assert "ep * " not in printed
    assert "fssdp *: with settings that are not its defaults, " in printed
    assert "planner hecate" in printed
    ranking = json.loads((tmp_path / "out" / "ranking.json").read_text())["strategies"]
    changed = {row["strategy"]: "planner hecate" in row["changed_settings"] for row in ranking}
    assert changed == {"ep": False, "fssdp": True}
