"""Runs with several expert-data-parallel groups and pipeline stages are recorded completely."""

from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.megatron_adapter.support.host_cores import usable_cores
from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.records.metrics import IterationMetrics, RunSession
from megatron_fssdp.records.metrics_file import read_evaluations, read_metrics
from megatron_fssdp.records.placements import read_placements

from ..training_run import relative_difference, train

STAGES, PEERS = "{PP2} {BATCH16}", "{TP2} {NO_BIAS}"


@pytest.mark.parametrize(
    ("layout", "num_sources"),
    [
        pytest.param("", 4, id="two expert-data-parallel groups"),
        # The re-sharding test below records two pipeline stages by default.
        pytest.param(STAGES, 2, id="two pipeline stages", marks=pytest.mark.slow),
        pytest.param(PEERS, 2, id="two expert-tensor-parallel peers"),
    ],
)
def test_all_devices_and_layers_are_recorded(
    layout: str, num_sources: int, text_data: Path, tmp_path: Path
) -> None:
    strategy = f"fssdp record_dir={tmp_path}"
    run = train(4, f"{{EP2}} {layout} --train-iters 3", text_data, strategy=strategy)
    metrics, loads = read_metrics(tmp_path), read_loads(tmp_path)
    assert [entry.iteration for entry in metrics] == [1, 2, 3]
    session = RunSession("fssdp", 3, 4, usable_cores(), devices=4, precision="fp32")
    assert [entry.session for entry in metrics] == [session, None, None]
    assert relative_difference(tuple(entry.lm_loss for entry in metrics), run.losses) == 0
    assert relative_difference(tuple(entry.grad_norm or 0 for entry in metrics), run.grad_norms) <= 1e-6
    assert all([layer.layer for layer in entry.layers] == [1, 2] for entry in metrics)
    assert loads.layers.tolist() == [1, 2]
    assert loads.counts_ILDE.shape == (3, 2, num_sources, 8)
    num_stages, batch = (2, 16) if layout == STAGES else (1, 8)
    assert (loads.counts_ILDE.sum(axis=(2, 3)) == batch * 16 * 2).all()
    assert loads.by_nodes_ILN is not None
    assert loads.by_devices_ILD is not None
    # All groups are inside one node, so each of the batch's tokens is on one node and on one or two devices.
    assert (loads.by_nodes_ILN == batch * 16).all()
    assert (loads.by_devices_ILD.sum(axis=2) == batch * 16).all()
    assert (loads.by_devices_ILD > 0).all()
    moved = [layer.spag_bytes for entry in metrics[1:] for layer in entry.layers]
    assert any(moved)
    replicas = [layer.num_replicas for entry in metrics[1:] for layer in entry.layers]
    biases = 0 if layout == PEERS else 64 + 32
    whole_expert_bytes = 4 * (2 * 32 * 64 + biases)
    assert moved == [number * whole_expert_bytes for number in replicas]
    assert moved == [layer.sprs_bytes for entry in metrics[1:] for layer in entry.layers]
    for layer in (layer for entry in metrics for layer in entry.layers):
        assert (layer.spag_s > 0) == (layer.spag_bytes > 0)
        assert (layer.sprs_s > 0) == (layer.sprs_bytes > 0)
        assert 0 <= layer.spag_exposed_s <= layer.spag_s
        assert 0 <= layer.sprs_exposed_s <= layer.sprs_s
    assert all(0 < entry.passes_s < entry.iteration_s for entry in metrics)
    check_passes(metrics, num_stages)
    # 6 operations per weight and token, of at least the selected experts.
    least = 6 * batch * 16 * 2 * (2 * 2 * 32 * 64)
    assert all(least < entry.flops < 20 * least for entry in metrics)
    # Megatron logs no iteration here, so memory is recorded only in the first and the last one.
    assert [len(entry.rank_peak_bytes) for entry in metrics] == [4, 0, 4]
    assert min(metrics[0].rank_peak_bytes) > 2**20
    check_placements(tmp_path, metrics, num_sources)
    assert all(entry.resharded_experts == entry.reshard_bytes == entry.reshard_s == 0 for entry in metrics)


def test_evaluations_are_recorded_with_their_data(text_data: Path, tmp_path: Path) -> None:
    evaluating = "{EP2} --train-iters 3 --split 40,40,20 --eval-interval 2 --eval-iters 1"
    train(2, evaluating, text_data, strategy=f"ep record_dir={tmp_path}")
    found = read_evaluations(tmp_path)
    assert [(one.iteration, one.data) for one in found] == [(2, "validation"), (3, "validation"), (3, "test")]
    losses = [entry.lm_loss for entry in read_metrics(tmp_path)]
    # Random tokens of the same kind: the loss on other data is close to that of training.
    assert all(abs(one.losses["lm loss"] - losses[-1]) < 0.5 for one in found)


def test_skipped_training_only_evaluates(text_data: Path, tmp_path: Path) -> None:
    layout = "{EP2} --train-iters 4 --split 40,40,20 --eval-interval 100 --eval-iters 1 {TORCH_DIST}"
    moving, folder = "fssdp slots=2 reshard_interval=2", tmp_path / "checkpoints"
    train(2, f"{layout} --save {folder} --save-interval 4", text_data, strategy=moving)
    losses = []
    for name in ("ep", moving, "flexmoe slots=2"):
        records = tmp_path / name.split()[0]
        skipping = f"{layout} --skip-train --load {folder}"
        train(2, skipping, text_data, strategy=f"{name} record_dir={records}")
        losses.append([one.losses["lm loss"] for one in read_evaluations(records)])
    assert len(losses[0]) == 2
    assert all(found == pytest.approx(losses[0], rel=1e-6) for found in losses)


def check_passes(metrics: list[IterationMetrics], num_stages: int) -> None:
    """Check the parts of every layer's passes."""
    for entry in metrics:
        inside_s = 0.0
        for layer in entry.layers:
            for one in (layer.forward, layer.backward):
                assert one is not None
                assert min(one.other_s, one.dispatch_s, one.experts_s, one.combine_s) > 0
                assert one.experts_slowest_s >= one.experts_s
                inside_s += one.other_s + one.dispatch_s + one.experts_s + one.combine_s
        # The parts are means over ranks, and the passes are those of one rank.
        assert inside_s / num_stages < 1.2 * entry.passes_s


def check_placements(record_dir: Path, metrics: list[IterationMetrics], num_devices: int) -> None:
    """Compare with the metrics of the same iterations."""
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


@pytest.mark.parametrize(
    ("layout", "num_copies"),
    [
        # The test above records two groups by default.
        pytest.param("", 2, id="two expert-data-parallel groups", marks=pytest.mark.slow),
        pytest.param(f"{STAGES} --num-layers 4", 1, id="two pipeline stages"),
    ],
)
def test_reshards_are_recorded_in_their_iterations(
    layout: str, num_copies: int, text_data: Path, tmp_path: Path
) -> None:
    strategy = f"fssdp reshard_interval=3 overlap_degree=1 slots=1 record_dir={tmp_path}"
    run = train(4, f"{{EP2}} {layout} --train-iters 5", text_data, strategy=strategy)
    metrics = read_metrics(tmp_path)
    assert relative_difference(tuple(entry.lm_loss for entry in metrics), run.losses) == 0
    for key in ("resharded_experts", "reshard_bytes"):
        assert [getattr(entry, key) > 0 for entry in metrics] == [False, False, False, True, False]
    moved = metrics[3]
    assert 0 < moved.reshard_s < moved.iteration_s
    slot_bytes = 3 * 4 * (2 * 32 * 64 + 64 + 32)  # the weights and Adam's two moments
    leaving, rest = divmod(moved.reshard_bytes, num_copies * slot_bytes)
    assert rest == 0
    assert 0 < leaving <= moved.resharded_experts
    assert moved.resharded_experts <= 8 * len(moved.layers)


def test_strategy_none_records_losses_without_layers(text_data: Path, tmp_path: Path) -> None:
    run = train(2, "{EP2} --train-iters 2", text_data, strategy=f"none record_dir={tmp_path}")
    metrics = read_metrics(tmp_path)
    assert relative_difference(tuple(entry.lm_loss for entry in metrics), run.losses) == 0
    assert all(entry.layers == () and entry.tokens_per_s > 0 for entry in metrics)
    assert not (tmp_path / "loads.npy").exists()
