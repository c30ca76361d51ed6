"""A run is recorded completely: all devices, layers and stages, in its files and on Megatron's boards."""

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import training

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.iterations.run_recorder import RunRecorder
from megatron_fssdp.records.loads import read_loads, read_micro_batch_loads
from megatron_fssdp.records.metrics import RunSession, read_metrics
from megatron_fssdp.records.placements import read_placements
from megatron_fssdp.records.recorded_run import load
from megatron_fssdp.records.run_settings import run_config_of

from ..training_run import assert_equal, note, relative_difference, slow, train, wrap

STAGES, PEERS = "{PP2} {BATCH16}", "{TP2} {NO_BIAS}"
RESHARDING = "reshard_interval=3 overlap_degree=1 slots=1"


@pytest.mark.parametrize(
    ("layout", "num_sources"),
    [
        pytest.param("", 4, id="two expert-data-parallel groups"),
        # The re-sharding test below records two pipeline stages by default.
        pytest.param(STAGES, 2, id="two pipeline stages", marks=pytest.mark.slow),
        pytest.param(PEERS, 2, id="two expert-tensor-parallel peers"),
    ],
)
def test_all_devices_and_layers_are_recorded(layout, num_sources, text_data, tmp_path):
    # Without slots, replicas come and go with each pass until memory is measured: here in two micro-batches.
    settings, num_gathers, num_reductions = ("", 4, 2) if layout == PEERS else ("slots=8", 1, 1)
    strategy = f"fssdp {settings} record_dir={tmp_path}"
    run = train(4, f"{{EP2}} {layout} --train-iters 3", text_data, strategy=strategy)
    metrics, loads = read_metrics(tmp_path), read_loads(tmp_path)
    layers = [layer for entry in metrics for layer in entry.layers]
    num_stages, batch = (2, 16) if layout == STAGES else (1, 8)
    assert [entry.iteration for entry in metrics] == [1, 2, 3]
    session = RunSession("fssdp", 3, 4, len(os.sched_getaffinity(0)), devices=4, precision="fp32")
    assert [entry.session for entry in metrics] == [session, None, None]
    assert [entry.lm_loss for entry in metrics] == pytest.approx(run.losses, rel=1e-6)
    assert relative_difference(tuple(entry.grad_norm or 0 for entry in metrics), run.grad_norms) <= 1e-6
    assert [layer.layer for layer in layers] == [1, 2] * 3
    assert loads.layers.tolist() == [1, 2]
    assert loads.counts_ILDE.shape == (3, 2, num_sources, 8)
    assert (loads.counts_ILDE.sum(axis=(2, 3)) == batch * 16 * 2).all()
    # All groups are inside one node, so each of the batch's tokens is on one node and on one or two devices.
    assert (loads.by_nodes_ILN == batch * 16).all()
    assert (loads.by_devices_ILD.sum(axis=2) == batch * 16).all()
    assert (loads.by_devices_ILD > 0).all()
    expert_bytes = 4 * (2 * 32 * 64 + (0 if layout == PEERS else 64 + 32))
    assert any(layer.num_replicas for layer in metrics[0].layers), "the first iteration is balanced, too"
    for layer in layers:
        replicas_bytes = layer.num_replicas * expert_bytes
        assert layer.spag_bytes == num_gathers * replicas_bytes
        assert layer.sprs_bytes == num_reductions * replicas_bytes
        assert (layer.spag_s > 0) == (layer.sprs_s > 0) == (layer.spag_bytes > 0)
        assert 0 <= layer.spag_exposed_s <= layer.spag_s
        assert 0 <= layer.sprs_exposed_s <= layer.sprs_s
    check_passes(metrics, num_stages)
    # 6 operations per weight and token, of at least the selected experts.
    least = 6 * batch * 16 * 2 * (2 * 2 * 32 * 64)
    assert all(least < entry.flops < 20 * least for entry in metrics)
    # Megatron logs no iteration here, so memory is recorded only in the first and the last one.
    assert [len(entry.rank_peak_bytes) for entry in metrics] == [4, 0, 4]
    assert min(metrics[0].rank_peak_bytes) > 2**20
    check_placements(tmp_path, metrics, num_sources)
    assert all(entry.resharded_experts == entry.reshard_bytes == entry.reshard_s == 0 for entry in metrics)


def note_routing():
    """Note the counts of each pass: layer, device and tokens by expert."""

    def routing(route, router, *args, **kwargs):
        probs, routing_map = route(router, *args, **kwargs)
        device = parallel_state.get_expert_model_parallel_rank()
        note((router.layer_number, device, routing_map.sum(dim=0).tolist()))
        return probs, routing_map

    wrap(TopKRouter, "routing", routing)


@pytest.fixture(scope="module")
def staged(text_data, tmp_path_factory):
    """Two pipeline stages with four micro-batches, re-sharding, and boards; and the folder of all records."""
    folder = tmp_path_factory.mktemp("staged")
    arguments = f"{{EP2}} {STAGES} --num-layers 4 --train-iters 5 --log-interval 2 --tensorboard-dir {folder}"
    arguments += f" --wandb-project p --wandb-exp-name e --wandb-save-dir {folder}"
    strategy = f"fssdp {RESHARDING} record_dir={folder}"
    return train(4, arguments, text_data, strategy=strategy, before=note_and_fake_wandb), folder


def test_single_micro_batches_are_recorded_as_they_were_routed(staged):
    run, folder = staged
    loads = read_micro_batch_loads(folder)
    assert loads.counts_IZLDE.shape == (5, 4, 4, 2, 8)
    assert loads.layers.tolist() == [1, 2, 3, 4]
    for layer in loads.layers:
        for device in (0, 1):
            routed = [note[2] for note in run.notes if note[:2] == (layer, device)]
            assert loads.counts_IZLDE[:, :, layer - 1, device].reshape(-1, 8).tolist() == routed
    np.testing.assert_array_equal(loads.counts_IZLDE.sum(axis=1), read_loads(folder).counts_ILDE)


def check_passes(metrics, num_stages):
    for entry in metrics:
        passes = [layer_pass for layer in entry.layers for layer_pass in (layer.forward, layer.backward)]
        inside_s = 0.0
        for layer_pass in passes:
            parts = (layer_pass.other_s, layer_pass.dispatch_s, layer_pass.experts_s, layer_pass.combine_s)
            assert min(parts) > 0
            assert layer_pass.experts_slowest_s >= layer_pass.experts_s
            inside_s += sum(parts)
        # The parts are means over ranks, and the passes are those of one rank.
        assert inside_s / num_stages < 1.2 * entry.passes_s
        assert 0 < entry.passes_s < entry.iteration_s


def check_placements(record_dir, metrics, num_devices):
    placements = read_placements(record_dir)
    assert placements.iterations.tolist() == [entry.iteration for entry in metrics]
    assert placements.present_ILED.shape == (3, 2, 8, num_devices)
    # Every group of two devices has every expert.
    assert (placements.owned_ILED.sum(axis=3) == num_devices // 2).all()
    tokens_ILD, ep_tokens_ILD = placements.tokens_ILD, placements.ep_tokens_ILD
    for key, values_IL in (
        ("num_replicas", (placements.present_ILED & ~placements.owned_ILED).sum(axis=(2, 3))),
        ("load_max_over_mean", tokens_ILD.max(axis=2) / tokens_ILD.mean(axis=2)),
        ("ep_load_max_over_mean", ep_tokens_ILD.max(axis=2) / ep_tokens_ILD.mean(axis=2)),
    ):
        recorded = [[getattr(layer, key) for layer in entry.layers] for entry in metrics]
        np.testing.assert_allclose(values_IL, recorded)


def check_reshards(run, folder, num_copies):
    metrics = read_metrics(folder)
    assert [entry.lm_loss for entry in metrics] == pytest.approx(run.losses, rel=1e-6)
    for key in ("resharded_experts", "reshard_bytes"):
        assert [getattr(entry, key) > 0 for entry in metrics] == [False, False, False, True, False]
    moved = metrics[3]
    assert 0 < moved.reshard_s < moved.iteration_s
    slot_bytes = 3 * 4 * (2 * 32 * 64 + 64 + 32)  # the weights and Adam's two moments
    leaving, rest = divmod(moved.reshard_bytes, num_copies * slot_bytes)
    assert rest == 0
    assert 0 < leaving <= moved.resharded_experts <= 8 * len(moved.layers)


def test_reshards_are_recorded_in_their_iterations(staged):
    check_reshards(*staged, num_copies=1)


@pytest.mark.slow
def test_reshards_of_copies_are_recorded(text_data, tmp_path):
    strategy = f"fssdp {RESHARDING} record_dir={tmp_path}"
    check_reshards(train(4, "{EP2} --train-iters 5", text_data, strategy=strategy), tmp_path, num_copies=2)


def test_strategy_none_records_losses(text_data, tmp_path):
    evaluating = "{EP2} --train-iters 2 --split 40,40,20 --eval-interval 2 --eval-iters 1"
    stock = train(2, evaluating, text_data, strategy="none")
    run = train(2, evaluating, text_data, strategy=f"none record_dir={tmp_path}")
    assert_equal(run, stock)
    metrics = read_metrics(tmp_path)
    assert [entry.lm_loss for entry in metrics] == pytest.approx(run.losses, rel=1e-6)
    assert all(entry.tokens_per_s > 0 for entry in metrics)


ALIKE = {"{EP2} {PP2} {BATCH16} {RECOMPUTE_MOE}": 4}
MORE = {"{EP2}": 4, "{EP2} {INTERLEAVED} {BATCH16}": 4, "{EP2} {TP2} {NO_BIAS}": 4, "{EP2} {MTP}": 2}
MORE |= {"{EP2} {DROPPING} {RECOMPUTE}": 2, "{NO_BIAS}": 1}


@pytest.mark.parametrize("layout", [*ALIKE, *slow(MORE)])
def test_none_and_ep_record_the_same_loads(layout, text_data, tmp_path):
    num_ranks = (ALIKE | MORE)[layout]
    for name in ("none", "ep"):
        strategy = f"{name} record_dir={tmp_path / name}"
        train(num_ranks, f"{layout} --train-iters 1", text_data, strategy=strategy)
    stock, ours = (load(tmp_path / name) for name in ("none", "ep"))
    # Routers of later iterations differ where ranks add gradients in another order.
    for record in ("loads", "placements"):
        pairs = zip(vars(getattr(stock, record)).values(), vars(getattr(ours, record)).values(), strict=True)
        for got, wanted in pairs:
            np.testing.assert_array_equal(got[:1], wanted[:1])
    for got, wanted in zip(stock.metrics[0].layers, ours.metrics[0].layers, strict=True):
        assert replace(wanted, forward=None, backward=None, strategy=None) == got


def note_evaluations():
    def noting(evaluate, *args, **kwargs):
        result = evaluate(*args, **kwargs)
        note(float(result[0]["lm loss"]))
        return result

    wrap(training, "evaluate", noting)


def test_skipped_training_only_evaluates(text_data, tmp_path):
    layout = "{EP2} --train-iters 3 --split 40,40,20 --eval-interval 100 --eval-iters 1 {TORCH_DIST}"
    moving, folder = "fssdp slots=2 reshard_interval=2", tmp_path / "checkpoints"
    train(2, f"{layout} --save {folder} --save-interval 3", text_data, strategy=moving)
    losses = []
    for name in ("ep", moving):
        skipping = f"{layout} --skip-train --load {folder}"
        recording = f"{name} record_dir={tmp_path / name.split()[0]}"
        losses.append(train(2, skipping, text_data, strategy=recording, before=note_evaluations).notes)
    assert len(losses[0]) == 4  # of two sets on two ranks
    assert all(of_strategy == pytest.approx(losses[0], rel=1e-6) for of_strategy in losses)


def test_boards_have_the_figures_of_logged_iterations(staged):
    """Rank 0 gathers the figures and the last rank has the boards; they are on different pipeline stages."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained, folder = staged
    assert load(folder).strategy == "fssdp"  # no command line wrote the run's settings
    run = run_config_of(folder)
    assert (run.parallelism.pipeline_model_parallel_size, run.model.num_experts) == (2, 8)
    assert run.strategy.settings == {"slots": 1, "overlap_degree": 1, "reshard_interval": 3}
    events = accumulators.EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0})
    events.Reload()
    tokens_ILE = read_loads(folder).counts_ILDE.sum(axis=2)
    assert "lm loss" in events.Tags()["scalars"]  # written by Megatron itself
    logged = [entry for entry in read_metrics(folder) if entry.iteration in (2, 4)]
    boards = [note for note in trained.notes if len(note) == 2]
    told = [(step, of) for step, of in boards if any(name.startswith("fssdp") for name in of)]
    assert [step for step, _ in told] == [2, 4]
    for entry, (_, of_wandb) in zip(logged, told, strict=True):
        wanted = figures("fssdp/{}", entry, "iteration")
        for layer in entry.layers:
            wanted |= figures(f"fssdp {{}}/layer {layer.layer}", layer, "layer")
        scalars = {name: {event.step: event.value for event in events.Scalars(name)} for name in wanted}
        assert {name: steps[entry.iteration] for name, steps in scalars.items()} == pytest.approx(wanted)
        tokens = {
            f"fssdp tokens of an expert/layer {n + 1}": tokens_ILE[entry.iteration - 1, n] for n in range(4)
        }
        assert {name: of_wandb.pop(name) for name in wanted} == pytest.approx(wanted)
        assert of_wandb == {name: load_E.tolist() for name, load_E in tokens.items()}
        for name, load_E in tokens.items():
            (value,) = (e.histogram_value for e in events.Histograms(name) if e.step == entry.iteration)
            assert (value.num, value.sum, value.max) == (8, load_E.sum(), load_E.max())


def figures(name, record, but):
    return {
        name.format(key): value
        for key, value in asdict(record).items()
        if isinstance(value, int | float) and key != but
    }


def note_and_fake_wandb():
    def log(values, step=None):
        note((step, {name: np.asarray(value).tolist() for name, value in values.items()}))

    note_routing()
    sys.modules["wandb"] = mock.Mock(log=log, Histogram=lambda sequence: sequence, **{"run.dir": ""})


def test_records_that_cannot_go_on_end_alone(caplog):
    recorder = object.__new__(RunRecorder)
    full = ConfigurationError("record_dir: disk full")
    recorder._metrics, recorder.record_dir = mock.Mock(**{"append.side_effect": full}), Path("folder")
    metrics = SimpleNamespace(iteration=7, session=None)
    for _ in range(2):
        recorder._write_or_stop(metrics, [])
    assert [record.getMessage() for record in caplog.records] == [
        "[fssdp] iteration 7: records end here, training goes on: record_dir: disk full"
    ]
    recorder._metrics = mock.Mock(**{"append.side_effect": full})
    with pytest.raises(ConfigurationError):  # A run begins only if its records do.
        recorder._write_or_stop(SimpleNamespace(iteration=1, session="first"), [])
