"""Models that join a strategy, and leave it when their loop drops them."""

import gc
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

import megatron_fssdp
from megatron_fssdp.config.strategy.strategy_registry import resolve_strategy
from megatron_fssdp.megatron_adapter.iterations import attachment
from megatron_fssdp.megatron_adapter.iterations.attachment import Attachment
from megatron_fssdp.records.metrics import read_metrics
from tests.support.training_preload import on_ranks, run_megatron_ranks

from . import host_loops


@on_ranks(2, ep=2)
def test_a_model_that_is_dropped_gives_its_memory_back():
    """NeMo-RL wraps a reference, too, copies its weights, and drops it."""
    for strategy in (("none", {}), ("ep", {}), ("fssdp", {"slots": 2, "overlap_degree": 3})):
        attachment = megatron_fssdp.attach(*strategy)
        trained, reference = (host_loops.wrapped(host_loops.config()) for _ in range(2))
        of_reference, rank = weakref.ref(reference), dist.get_rank()
        assert len(attachment.models) == 2
        tokens = torch.arange(host_loops.LENGTH)[None] + rank
        with torch.no_grad():
            reference.eval()(tokens, tokens - rank, torch.ones(1, 1, 1, 1, dtype=torch.bool))
        del reference
        gc.collect()
        assert len(attachment.models) == 1
        assert of_reference() is None
        del trained


def train_two(rank, world_size, folder):
    megatron_fssdp.attach("fssdp", {"slots": 2, "record_dir": str(folder)})
    models = [host_loops.Host(), host_loops.Host()]
    for _ in range(2):
        losses = []
        for model in models:
            model.reset()
            losses.append(model.passes())
        for model, loss in zip(models, losses, strict=True):
            model.step(loss)


def test_models_that_train_side_by_side_have_records_of_their_own(tmp_path):
    run_megatron_ranks(train_two, 2, tmp_path / "records", ep=2)
    for folder in ("records", "records-2"):
        assert [entry.iteration for entry in read_metrics(tmp_path / folder)] == [1, 2]


@pytest.mark.parametrize(
    ("variables", "modules", "says"),
    [
        ({}, (), "wrapped no MoE layer\n"),
        ({}, ("ray",), "attach in the workers, too\n"),
        ({"RANK": "0"}, ("ray",), "wrapped no MoE layer\n"),
        ({"RANK": "1"}, (), ""),
    ],
)
def test_a_process_in_which_nothing_joined_says_so_unless_another_rank_does(
    variables, modules, says, monkeypatch, capsys
):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, sys)
    attached = Attachment("fssdp", resolve_strategy("fssdp", None, []))
    monkeypatch.setattr(attachment, "_current", attached)
    attached._tell_absence()
    said = capsys.readouterr().out
    assert said.endswith(says)
    assert bool(said) == bool(says)
