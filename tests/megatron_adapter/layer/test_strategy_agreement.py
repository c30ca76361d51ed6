"""What a training under each registered strategy did is what the simulator says, with the losses of plain EP.

The simulator replays the recorded loads with the same costs, which are planted in the training.
"""

import sys

import numpy as np
import pytest
from megatron.training import get_args

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES, resolve_strategy
from megatron_fssdp.megatron_adapter.iterations import iteration_driver
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.records.metrics import read_metrics
from megatron_fssdp.records.placements import read_placements
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.simulation.replay import replay_strategy
from megatron_fssdp.strategies.registry import build_strategy
from tests.support.python_process import ROOT

from ..training_run import add_to_logits, assert_close, note, slow, train, wrap

EXAMPLE = "second_home"
# Short intervals, so that everything happens in the run; a strategy without keys here runs with its defaults.
KEYS = {
    "fssdp": "slots=1 reshard_interval=2",
    "prophet": "left_out=1",
    "quota": "slots=2",
    "smartmoe": "reshard_interval=2 window=2",
    "flexmoe": "slots=2 placement_interval=2 window=2",
    "auto": "choice_interval=2",
    EXAMPLE: "threshold=1 swap_every=2",
}
NAMES = [name for name, entry in STRATEGIES.items() if entry.strategy is not None and name != EXAMPLE]
IN_TURN = [f"{name} overlap=false" for name in NAMES if "overlap" in STRATEGIES[name].settings.model_fields]
LINK = LinkCost(0.0, 1e-9)
PROFILE = LayerProfile(1e-6, ClusterCost(LINK, LINK, 1e6, LINK), 300, 100, 50.0, 3)
WORLD, NUM_ITERATIONS, MEASURED = 4, 5, 1
ARGUMENTS = f"{{EP4}} --train-iters {NUM_ITERATIONS}"
TOPOLOGY = Topology.uniform(WORLD, 2)


def prepare():
    """Run on every rank: plant the costs, and make two experts hot, and others in the second half."""

    def plant(layers, *_, **__):
        for layer in layers:
            layer.local.set_profile(PROFILE)

    def note_plan(travel, self):
        plan = self.passes.in_use.plan  # of the only micro-batch of an iteration
        has_replicas = plan.placement.num_replicas > 0
        life = plan.life.value if has_replicas else None
        note((life, plan.gather_ahead and has_replicas, self.groups.transfers is not None))
        travel(self)

    register_example()
    iteration_driver.profile_layers = plant
    wrap(SlotLayer, "rows_travel", note_plan)
    add_to_logits(lambda logits: [0, 1] if get_args().curr_iteration < NUM_ITERATIONS // 2 else [4, 5], 2.0)


def register_example():
    if EXAMPLE not in STRATEGIES:
        sys.path.insert(0, str(ROOT / "examples" / EXAMPLE))
        import second_home

        second_home.register()


def trained(words, data, folder):
    strategy = f"{words} record_dir={folder} FSSDP_PROFILE_ITERATIONS={MEASURED}"
    return train(WORLD, ARGUMENTS, data, strategy=strategy, before=prepare)


@pytest.fixture(scope="module")
def plain(text_data, tmp_path_factory):
    """A training under plain expert parallelism, and its records."""
    folder = tmp_path_factory.mktemp("ep")
    return trained("ep nodes=2", text_data, folder), folder


@pytest.mark.parametrize("chosen", [*NAMES, EXAMPLE, *slow(IN_TURN)])
def test_training_and_simulator_agree(chosen, plain, text_data, tmp_path, monkeypatch):
    name, *more = chosen.split()
    keys = [*KEYS.get(name, "").split(), *more, "nodes=2"]
    run, folder = plain
    if chosen != "ep":
        folder = tmp_path
        run = trained(f"{name} {' '.join(keys)}", text_data, folder)
        assert_close(run, plain[0])
    metrics, placements = read_metrics(folder), read_placements(folder)

    monkeypatch.setenv("FSSDP_PROFILE_ITERATIONS", str(MEASURED))
    monkeypatch.setattr(STRATEGIES, "_entries", dict(STRATEGIES._entries))
    register_example()
    strategy = build_strategy(name, resolve_strategy(name, None, keys))
    simulated = list(replay_strategy(strategy, read_loads(folder).counts_ILDE, TOPOLOGY, PROFILE))
    notes = iter(run.notes[: NUM_ITERATIONS * 2])  # of rank 0
    observed = []
    for iteration, record in enumerate(simulated):
        for layer, (_, plan, counts_DE) in enumerate(record.micro_batches[0]):
            where = f"iteration {iteration}, layer {layer}"
            present_ED = placements.present_ILED[iteration, layer]
            np.testing.assert_array_equal(plan.placement.present_ED, present_ED, where)
            # Plans of exact shares have parts of tokens. A source's share table rounds them to whole tokens.
            tokens_D = plan.dispatch(counts_DE, TOPOLOGY).whole_tokens_D
            difference_D = tokens_D - placements.tokens_ILD[iteration, layer]
            assert np.abs(difference_D).max() <= WORLD, where
            assert not difference_D.sum(), where
            life, overlaps, has_group = next(notes)
            has_replicas = plan.placement.num_replicas > 0
            assert life == (plan.life.value if has_replicas else None), where
            assert overlaps == (plan.gather_ahead and has_replicas), where
            assert has_group or not overlaps
            observed.append((has_replicas, overlaps))
    moved = [len(record.source_P) for record in simulated]
    assert moved == [entry.resharded_experts for entry in metrics]
    # None of this is empty: what a strategy says that it can do, it does.
    assert any(replicas for replicas, _ in observed) == (strategy.selects or strategy.may_replicate(1))
    assert strategy.selects or any(moved) == bool(strategy.moves_owners or strategy.resident_slots)
    assert "overlap=false" not in chosen or not any(overlaps for _, overlaps in observed)
