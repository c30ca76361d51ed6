"""Loops that call megatron-core's dist_checkpointing themselves, as verl, slime and NeMo-RL do."""

import queue
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_preload import run_megatron_ranks

from ..iterations.host_loops import Host

NONE = ("none", {})
MOVING = ("fssdp", {"slots": 2, "overlap_degree": 3, "reshard_interval": 3})
TRAINED, MORE = 4, 2
FORMATS = ("fully_reshardable", "dp_reshardable")


def states_of(host: Host, sharding: str, *, is_loading: bool = False) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": sharding}
    model = host.gpt.sharded_state_dict(metadata=metadata)
    optimizer = host.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "content_metadata": metadata}


def train(host: Host, begin: int, number: int) -> list[float]:
    for iteration in range(begin, begin + number):
        host.at(iteration)
        host.reset()
        host.step(host.passes())
    return host.found.losses[-number:]


def save_and_resume(folder: Path, sharding: str) -> tuple[Any, ...]:
    """Losses after the save, of stock and then of others and of resumed runs; moves; what was refused."""
    from megatron.core import dist_checkpointing

    import megatron_fssdp
    from megatron_fssdp.config.errors import ConfigurationError

    losses, moved, refusal = [], [], ""

    def note_move(attachment: Any) -> None:
        moved.append(not attachment.models[0].session.slots.owners.is_even)

    for name, settings in (NONE, MOVING):
        attachment = megatron_fssdp.attach(name, settings)
        host = Host()
        train(host, 0, TRAINED)
        (place := folder / sharding / name).mkdir(parents=True, exist_ok=True)
        states = states_of(host, sharding)
        dist_checkpointing.save(states, str(place))
        if name == "fssdp":
            note_move(attachment)
        losses.append(train(host, TRAINED, MORE))
        if name == "fssdp":
            note_move(attachment)
            try:
                dist_checkpointing.save(states, str(place))
            except ConfigurationError as error:
                refusal = str(error)
        for loading in (NONE, MOVING) if name == "fssdp" else (MOVING,):
            attachment = megatron_fssdp.attach(*loading)
            host = Host()
            loaded = dist_checkpointing.load(states_of(host, sharding, is_loading=True), str(place))
            host.gpt.load_state_dict(loaded["model"])
            host.optimizer.load_state_dict(loaded["optimizer"])
            losses.append(train(host, TRAINED, MORE))
            if name == loading[0] == "fssdp":
                note_move(attachment)
    return losses, moved, refusal


def save_in_formats(rank: int, world_size: int, folder: Path) -> list[tuple[Any, ...]]:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # Megatron's own queue takes a process, and seconds.
    return [save_and_resume(folder, sharding) for sharding in FORMATS]


def test_moved_experts_and_their_states_resume_under_any_strategy(tmp_path):
    for of_rank in run_megatron_ranks(save_in_formats, 2, tmp_path, ep=2):
        for (wanted, *others), moved, refusal in of_rank:
            assert moved == [False, True, True]  # Experts are home for the save, and move back.
            for losses in others:
                assert losses == pytest.approx(wanted, rel=1e-6)
            assert "made before an iteration" in refusal
