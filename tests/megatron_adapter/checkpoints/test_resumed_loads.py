"""A resumed run knows the loads of before, so it starts with the plans of a run without a break."""

from pathlib import Path

import pytest

from ..training_run import assert_equal, rows, slow, train

COMMON = "{TORCH_DIST} --train-iters 8 {SHORT_AVERAGES} --lr 5e-3"
LIMITED = "slots=2 overlap_degree=3 reshard_interval=2"
# name | ranks | Megatron's arguments | strategy
RUNS = rows(
    """
    fssdp_bf16_distributed | 4 | {EP2} --bf16 {RESHARDABLE} | fssdp {LIMITED}
    fssdp_pipeline | 4 | {EP2} {PP2} --bf16 | fssdp {LIMITED}
    fssdp_mtp | 2 | {EP2} {MTP} --bf16 | fssdp {LIMITED}
    """,
    LIMITED=LIMITED,
)
FIRST, *SLOW = RUNS


@pytest.mark.parametrize("name", [FIRST, *slow(SLOW)])
def test_a_resumed_run_has_the_bits_of_one_without_a_break(
    name: str, text_data: Path, tmp_path: Path
) -> None:
    num_ranks, arguments, strategy = int(RUNS[name][0]), f"{COMMON} {RUNS[name][1]}", RUNS[name][2]
    whole = train(num_ranks, arguments, text_data, strategy=strategy)
    saving = f"--exit-interval 5 --save {tmp_path} --save-interval 5"
    train(num_ranks, f"{arguments} {saving}", text_data, strategy=strategy)
    rest = train(num_ranks, f"{arguments} --load {tmp_path}", text_data, strategy=strategy)
    assert_equal(rest, whole, since=5)


def test_loads_of_another_layout_are_left_out_with_a_line(text_data: Path, tmp_path: Path) -> None:
    saving = f"--exit-interval 2 --save {tmp_path} --save-interval 2"
    train(4, f"{COMMON} {{EP4}} {saving}", text_data, strategy="fssdp")
    rest = train(4, f"{COMMON} {{EP2}} --load {tmp_path}", text_data, strategy="fssdp")
    assert any("loads are not used" in message for message in rest.messages)
