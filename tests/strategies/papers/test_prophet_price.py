"""Pro-Prophet's searches are priced together, and each price is that of the plan alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.config.strategy.paper_strategy_settings import ProphetSettings
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.papers.prophet_planner import plan_layers
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import CUDA_MESSAGES, HOST_MESSAGES
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.papers import prophet
from megatron_fssdp.strategies.plan_seconds import plan_seconds
from tests.drawn_examples import examples


@pytest.mark.parametrize(("overlap", "split"), [(False, False), (True, False), (True, True)])
@examples(30)
@given(seed=st.integers(0, 2**32 - 1))
def test_prices_of_all_searches_are_those_of_their_plans(overlap: bool, split: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = Topology.from_labels(rng.integers(0, 3, 8).tolist())
    owner_E = rng.integers(0, 8, 12)
    counts_DE = rng.multinomial(500, rng.dirichlet(np.full(12, 0.3)), size=8).astype(np.int64)
    profile = LayerProfile(
        10 ** rng.uniform(-6, -3),
        ClusterCost(LinkCost(1e-6, 1e-11), LinkCost(1e-5, 1e-10), 1e13),
        expert_bytes=int(10 ** rng.uniform(3, 6)),
        token_bytes=4096,
        flops_per_token=1e7,
        memory_capacity=2,
        gradient_bytes=int(10 ** rng.uniform(3, 6)),
        messages=CUDA_MESSAGES if seed % 2 else HOST_MESSAGES,
    )
    context = LayerContext(1, owner_E, topology, profile)
    strategy = prophet.ProphetStrategy(ProphetSettings(overlap=overlap, split=split, slots=2))
    model = prophet._model(profile, topology, overlaps=overlap)
    found = plan_layers(owner_E, counts_DE, model, [0, 1, 2, 4], balance=0.1, slots=2)
    priced, shares = strategy._seconds(found, counts_DE, context, profile)
    plans = [
        strategy._plan_of(found.placement(search), shares.of_case(1 + search), context) for search in range(4)
    ]
    seconds = [plan_seconds(plan, counts_DE, context) for plan in (LayerPlan.owners_only(context), *plans)]
    assert priced.tolist() == seconds
