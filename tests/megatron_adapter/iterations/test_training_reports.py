"""The lines of the log that say how evenly a training loads its devices."""

import re

import pytest
import torch.distributed as dist

import megatron_fssdp
from tests.support.training_preload import on_ranks

from ..training_run import messages_of, train
from .host_loops import Host
from .test_host_loops import FSSDP
from .test_unusual_loops import by_hand_in_eval_mode

GIVEN = "fssdp slots=2 overlap_degree=4"
SKEWED = "{EP2} --train-iters 6 --log-interval 2 --moe-router-force-biased 1.5"


def lines_of(text_data, strategy, arguments=SKEWED, ranks=2):
    messages = train(ranks, arguments, text_data, strategy=strategy).messages
    return [message for message in messages if "× mean load" in message]


def loads(line):
    match = re.search(r"busiest device ([\d.]+)(?: → ([\d.]+))? × mean load", line)
    assert match, line
    return [float(number) for number in match.groups() if number]


def test_a_line_during_the_training_and_one_at_its_end(text_data, tmp_path):
    during, end = lines_of(text_data, f"{GIVEN} record_dir={tmp_path / 'run'}")
    assert during.startswith("[fssdp] iteration 2: busiest device ")
    assert end.startswith("[fssdp] fssdp at the end, iteration 6: busiest device ")
    before, after = loads(end)
    assert 1 <= after < before
    for line in (during, end):
        assert re.search(r"[\d.]+ of 8 possible replicas a layer", line)
    assert re.search(r"waits [\d.e-]+ ms \([\d.]+%\) for weights and [\d.e-]+ ms \([\d.]+%\) for", end)
    assert end.endswith(f"Next: megatron-fssdp report {tmp_path / 'run'}")


@pytest.mark.parametrize(
    ("strategy", "arguments", "said"),
    [
        ("ep", "{EP2} --train-iters 2 --moe-router-force-load-balancing", "so plain EP would do"),
        ("fssdp FSSDP_PROFILE_ITERATIONS=1", "{EP2} --train-iters 2", "busiest device"),
    ],
)
def test_the_last_line_without_records(strategy, arguments, said, text_data):
    *_, end = lines_of(text_data, strategy, arguments)
    assert said in end
    assert "waits" not in end
    if strategy == "ep":
        assert len(loads(end)) == 1
    assert end.endswith("Next: record with --moe-strategy-set record_dir=DIR, then megatron-fssdp report DIR")


@on_ranks(2, ep=2)
def test_a_loop_whose_passes_nobody_counts_is_told():
    messages = messages_of("megatron_fssdp")
    attachment, host = megatron_fssdp.attach(*FSSDP), Host()
    for _ in range(2):
        by_hand_in_eval_mode(host)
    attachment.models[0].driver.tell_end()
    assert dist.get_rank() or "balanced nothing" in messages[-1]


@pytest.mark.slow
def test_pipeline_stages_have_a_line_each(text_data):
    lines = lines_of(text_data, "ep", "{EP2} {PP2} --train-iters 2", 4)
    ends = sorted(line for line in lines if "at the end" in line)
    assert [("stage 0" in line, "Next: " in line) for line in ends] == [(True, True), (False, False)]
