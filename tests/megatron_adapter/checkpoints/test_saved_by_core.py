"""Loops that call megatron-core's dist_checkpointing themselves, as verl, slime and NeMo-RL do."""

import queue
from itertools import product

import pytest
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

import megatron_fssdp
from megatron_fssdp.config.errors import ConfigurationError
from tests.support.training_preload import on_ranks

from ..iterations.host_loops import Host

NONE = ("none", {})
MOVING = ("fssdp", {"slots": 2, "overlap_degree": 3, "reshard_interval": 2})
TRAINED, MORE = 3, 2
FORMATS = ("fully_reshardable", "dp_reshardable")


def states_of(host, sharding, *, is_loading=False):
    metadata = {"distrib_optim_sharding_type": sharding}
    model = host.gpt.sharded_state_dict(metadata=metadata)
    optimizer = host.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "content_metadata": metadata}


def train(host, begin, number):
    for iteration in range(begin, begin + number):
        host.at(iteration)
        host.reset()
        host.step(host.passes())
    return host.results.losses[-number:]


def is_moved(attachment):
    return not attachment.models[0].session.slots.owners.is_even


@on_ranks(2, ep=2)
def test_moved_experts_and_their_states_resume_under_any_strategy(tmp_path):
    filesystem_async._results_queue = queue.Queue()  # Megatron's own queue takes a process, and seconds.
    of_stock = []
    for saving in (NONE, MOVING):
        attachment = megatron_fssdp.attach(*saving)
        host, states, places = Host(), {}, {sharding: tmp_path / sharding / saving[0] for sharding in FORMATS}
        train(host, 0, TRAINED)
        for sharding, place in places.items():
            place.mkdir(parents=True, exist_ok=True)
            states = states_of(host, sharding)
            dist_checkpointing.save(states, str(place))
        assert saving is NONE or not is_moved(attachment), "experts are home for the save"
        losses = train(host, TRAINED, MORE)
        of_stock = of_stock or losses
        wanted = pytest.approx(of_stock, rel=1e-6)
        assert losses == wanted
        if saving is MOVING:
            assert is_moved(attachment), "experts move back"
            with pytest.raises(ConfigurationError, match="made before an iteration"):
                dist_checkpointing.save(states, str(place))
        for (sharding, place), loading in product(places.items(), (NONE, MOVING)):
            if saving is loading is NONE:
                continue
            attachment = megatron_fssdp.attach(*loading)
            host = Host()
            loaded = dist_checkpointing.load(states_of(host, sharding, is_loading=True), str(place))
            host.gpt.load_state_dict(loaded["model"])
            host.optimizer.load_state_dict(loaded["optimizer"])
            assert train(host, TRAINED, MORE) == wanted
            assert NONE in (saving, loading) or is_moved(attachment)
