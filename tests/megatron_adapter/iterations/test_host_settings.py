"""What one rank refuses, and ranks with different settings, end all ranks with one line."""

import logging
import os
import random
import time
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_fssdp.megatron_adapter.entry import registration
from megatron_fssdp.megatron_adapter.iterations import host_settings
from tests.support.training_preload import on_ranks

from ..training_run import train_on_all_ranks, wrap

SHORT = "{EP2} --train-iters 2"


def other_files():
    """Let each rank find another file, as on nodes that do not share them."""
    rank = int(os.environ["RANK"])
    folder = Path(os.environ["FOLDER"]) / str(rank)
    folder.mkdir()
    os.chdir(folder)
    Path("strategy.yaml").write_text(f"slots: {1 + rank}\n")


def other_queues():
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(1 + int(os.environ["RANK"]))


def other_routing():
    """Let each rank's command line ask for another number of experts for a token."""

    def attach(stock, requested):
        (args,) = requested.host.sources
        args.moe_router_topk = 2 + int(os.environ["RANK"])
        stock(requested)

    wrap(registration, "use", attach)


@pytest.mark.parametrize(
    ("before", "more", "message"),
    [
        (other_files, "--moe-strategy-config strategy.yaml", "slots: got 1 on rank 0 and 2 on rank 1"),
        (other_routing, "", "--moe-router-topk: got 2 on rank 0 and 3 on rank 1"),
        (other_queues, "", "CUDA_DEVICE_MAX_CONNECTIONS is 1: got True on rank 0 and False on rank 1"),
        # A folder that only rank 0 finds not to be one.
        (None, "--moe-strategy ep --moe-strategy-set record_dir={file}", "record_dir"),
    ],
)
def test_all_ranks_are_refused(before, more, message, text_data, tmp_path):
    (tmp_path / "file").touch()
    more = more.replace("{file}", str(tmp_path / "file"))
    options = {"before": before, "env": {"FOLDER": str(tmp_path)}, "grace_s": 300}
    runs = train_on_all_ranks(2, f"{SHORT} --moe-strategy fssdp {more}", text_data, **options)
    assert [run.exit_code for run in runs] == [2, 2]
    assert all(message in run.errors for run in runs)


@on_ranks(2, ep=2)
def test_a_rank_says_for_whom_it_waits():
    """A host may hand the variables that attach a strategy to some of its workers only."""
    host_settings._TOLD_AFTER_S, heard = 0.5, BufferingHandler(99)
    logging.getLogger("megatron_fssdp").addHandler(heard)
    dist.barrier()
    if is_late := dist.get_rank() == 1:
        time.sleep(1.5)
    host_settings.check_equal({"--moe-strategy": "fssdp"})
    said = [record.getMessage().partition(",")[0] for record in heard.buffer]
    assert said == ([] if is_late else ["[fssdp] rank 0 waits for others of 2 ranks"])


class Optimizer:
    config = None


def test_optimizers_of_a_model_are_in_the_order_in_which_they_were_built(monkeypatch):
    """Else the settings of the first one would differ between ranks."""
    model, built = SimpleNamespace(chunks=[]), [Optimizer() for _ in range(20)]
    monkeypatch.setattr(host_settings, "models_of", lambda _: [model])
    monkeypatch.setattr(host_settings, "_built", type(host_settings._built)())
    random.Random(0).shuffle(built)
    for optimizer in built:
        host_settings.note_optimizer(lambda self: None, optimizer)
    assert host_settings.optimizer_of(model).chained_optimizers == built
