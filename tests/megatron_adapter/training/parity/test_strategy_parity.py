"""Complete trainings under every other strategy and the smart schedule have the losses of plain EP.

These strategies decide by measured costs, so links are planted to cost almost nothing, and two experts of one
device are hot: then all of them move experts. Transfers are split nevertheless. Where prices decide about the
smart schedule, one half of the layers uses it in one iteration, and the other half in the next one. Layouts
are those of the parity matrix. ``test_strategy_agreement.py`` compares the losses of one layout by default.
"""

import numpy as np
import pytest

from megatron_fssdp.planning.cost.cost_model import LinkCost
from megatron_fssdp.planning.cost.link_seconds import LinkSet
from megatron_fssdp.records.metrics import read_metrics
from megatron_fssdp.runtime.layers import layer_profiling
from megatron_fssdp.strategies import layer_planning
from megatron_fssdp.strategies.auto import auto_strategy
from megatron_fssdp.strategies.flexmoe import flexmoe_strategy
from megatron_fssdp.strategies.fssdp import fssdp_strategy
from megatron_fssdp.strategies.prophet import prophet_strategy

from ...training_run import GPT, HALF, add_to_logits, assert_close
from .comparison import layouts, replicas_of, trained
from .test_parity_matrix import LAYOUTS

STRATEGIES = {
    "fastermoe": "slots=2 smart_schedule=by_price",
    "prophet": "slots=2",
    "quota": "slots=2",
    "smartmoe": "reshard_interval=2 window=2",
    "flexmoe": "slots=2 placement_interval=2 window=2",
    "fssdp": "slots=2 overlap_degree=3 reshard_interval=2",
    "fssdp-first": "slots=2 planned_from=first reshard_interval=2",
    "fssdp-each": "slots=2 planned_from=each reshard_interval=2",
    "ep": "smart_schedule=true group_size=1",
    "auto": "choice_interval=1",
}
MORE = """
    copies_bf16_recomputed_moe | 4 2 | --bf16 {RECOMPUTE_MOE} {BATCH16}
    two_nodes | 4 4 | {GATED} {BATCH16} | nodes=2
"""
ALL = {**LAYOUTS, **layouts(MORE)}


def cheap_links():
    cost = LinkCost(0.0, 1e-13)
    layer_profiling.measure_links = lambda *_: LinkSet(cost, cost, cost)
    fssdp_strategy.early_share = prophet_strategy.early_share = lambda *_: 0.4
    layer_planning.in_steps = in_turns
    auto_strategy.COMPARED_ITERATIONS = 0
    auto_strategy.AutoStrategy.price = next_in_turn
    prophet_strategy.PROPHET_BALANCE, flexmoe_strategy.FLEXMOE_THRESHOLD = 0.1, 1.01


def cheap_links_and_hot_experts():
    """As cheap_links; the first device owns two hot experts, so that it pays to move one of them."""
    cheap_links()
    add_to_logits(lambda logits: [0, 1], 1.0)


def in_turns(strategy, context, history, plan):
    """Have neighbouring layers differ, and each layer change after every iteration."""
    if strategy.travel.smart_schedule == "by_price":
        return (context.layer + history.num_seen) % 2 == 0
    return bool(strategy.travel.smart_schedule)


def next_in_turn(choosing, contexts, histories):
    """Have each layer select another strategy every time, so that trainings change from each to each."""
    names = list(choosing.candidates)
    seconds_LC = np.ones((len(contexts), len(names)))
    for index, context in enumerate(contexts):
        able = [name for name in names if choosing.serves(name, context)]
        following = able[(able.index(choosing.selected(context.layer)) + 1 + context.layer % 2) % len(able)]
        seconds_LC[index, names.index(following)] = 0.1
    return seconds_LC


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_losses_equal_plain_expert_parallelism(name, text_data, tmp_path):
    compare_strategies(ALL[name], text_data, tmp_path)


def compare_strategies(layout, data, folder, model=GPT):
    """Train under every strategy from one seed, with records, and compare with plain expert parallelism."""
    wanted = _train(layout, "ep", "", data, folder, model)
    arguments, experts = layout.arguments, 4 if "--num-experts 4" in layout.arguments else 8
    has_parts = "--expert-tensor-parallel-size 2" in arguments or (
        "--tensor-model-parallel-size 2" in arguments and "--expert-tensor-parallel-size 1" not in arguments
    )
    for strategy, settings in STRATEGIES.items():
        if (
            (strategy == "smartmoe" and experts <= layout.ep)  # one expert for each device
            or (strategy == "flexmoe" and "--fp16" in arguments)
            or ("smart_schedule" in settings and has_parts)
        ):
            continue  # refused
        run = _train(layout, strategy, settings, data, folder, model)
        assert_close(run, wanted, *(HALF if layout.is_half else ()))
        _check_use(layout, strategy, run, folder)


def _check_use(layout, strategy, run, folder):
    """Check that a strategy did more than plain expert parallelism."""
    metrics = read_metrics(folder / strategy)
    if strategy == "auto":
        chosen = {layer.strategy for entry in metrics for layer in entry.layers}
        # A group of one device has nothing to select.
        assert chosen == ({"ep", "fssdp"} if layout.ep > 1 else {"ep"})
    # Where tokens are dropped, loads are nearly even, and strategies that use exact counts can do nothing.
    drops = "--moe-expert-capacity-factor" in layout.arguments
    # With one expert on each device, two devices are hot, and one shadow alone saves nothing.
    shadows = strategy == "fastermoe" and "--num-experts 4" not in layout.arguments
    after_gate = strategy in ("quota", "fssdp-first", "fssdp-each")
    if (shadows or after_gate or strategy in ("prophet", "auto")) and layout.replicates and not drops:
        assert any(replicas_of(metrics)), strategy
    if strategy == "flexmoe" and layout is ALL["two_nodes"]:
        assert any("replicas: " in message for message in run.messages)
    if strategy == "smartmoe" and layout.moves:
        assert any("re-sharded" in message for message in run.messages)


def _train(layout, strategy, settings, data, folder, model):
    keys = [*settings.split(), *(key for key in layout.settings.split() if key.startswith("nodes="))]
    if strategy not in ("ep", "fssdp"):
        keys.append("FSSDP_PROFILE_ITERATIONS=1")
    chosen = f"{strategy.partition('-')[0]} {' '.join(keys)} record_dir={folder / strategy}"
    return trained(layout, chosen, data, model=model, before=cheap_links_and_hot_experts)
