"""Complete trainings with the deduplicated exchange: losses equal stock Megatron's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fssdp.strategies import priced_exchange

from ...training_run import relative_difference, train_on_all_ranks
from .test_parity_matrix import DEFAULT, DROPPING, MORE, NO_BIAS, Layout, compare

# Layouts of the matrix whose features meet the exchange of rows.
LAYOUTS = (
    "copies_overlaps_bf16",
    "experts_in_tensor_parallel_parts",
    "interleaved_pipeline_overlaps",
    "recomputed_moe_expert_bias_calibrated",
    "biases_on_declared_nodes",
    "copies_top4_hecate",
    "ep8_bf16_distributed",
    "ep8_top1_dropping_hecate",
    "ep4_of_8_overlaps_recomputed",
    "tp2_expert_tp1_distributed_expert_bias",
    "tp2_expert_tp2_copies_distributed",
    "pipeline_recomputed_rematerialized",
    "recomputed_aux_loss_shared_expert",
    "padded_to_capacity",
)

# Groups of one device have nothing to deduplicate, also where capacity leaves tokens without an expert.
ONE_DEVICE = Layout(
    2,
    1,
    f"--expert-tensor-parallel-size 2 --moe-router-topk 2 {DROPPING} {NO_BIAS}",
    "exchange=deduplicated",
    moves=False,
    replicates=False,
)


@pytest.mark.slow
def test_groups_of_one_device_drop_tokens_as_stock_megatron(
    text_data: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    compare(ONE_DEVICE, text_data, tmp_path, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_stock_megatron(
    name: str, text_data: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    layout = (DEFAULT | MORE)[name]
    settings = f"{layout.settings} exchange=deduplicated"
    compare(replace(layout, settings=settings, num_iterations=20), text_data, tmp_path, record_property)


def at_any_price() -> None:
    """Between CPU ranks the exchange would hardly ever pay, so it is used here whatever it costs."""
    priced_exchange.LEAST_GAIN = -1e9


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["copies_top4_hecate", "experts_in_tensor_parallel_parts", "pipeline_recomputed_rematerialized"]
)
def test_losses_do_not_change_with_the_exchange(name: str, text_data: Path) -> None:
    """Tokens are sent as pairs until costs are measured, and once from then on."""
    layout = (DEFAULT | MORE)[name]
    keys = f"{layout.settings} exchange=by_price profile_iterations=2 check_plans=true".split()
    by_price = " ".join(["fssdp", *(f"--moe-strategy-set {key}" for key in keys)])
    stock, ours = (
        train_on_all_ranks(
            layout.num_ranks,
            f"--expert-model-parallel-size {layout.ep} {layout.arguments} --train-iters 20 "
            f"--moe-strategy {strategy}",
            text_data,
            before=at_any_price,
        )
        for strategy in ("none", by_price)
    )
    assert not any(run.exit_code for run in (*stock, *ours)), [run.errors[-1000:] for run in ours]
    assert relative_difference(ours[-1].losses, stock[-1].losses) <= 1e-5
    told = [text for run in ours for text in run.messages if "exchange by price" in text]
    assert told
    assert all("exchange by price, iteration 3: layers" in text for text in told)
