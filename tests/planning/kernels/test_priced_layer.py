import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning import compiled_form
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.search import layer_search
from tests.drawn_examples import SEEDS, examples
from tests.planning.placement_cases import random_counts_DE
from tests.planning.test_search import profiles

with pytest.MonkeyPatch.context() as patch:  # other tests keep the compiled form
    for name, module in compiled_form._kernels()[0].items():
        patch.setitem(sys.modules, compiled_form._module_name(name), module)
    PricedLayer = compiled_form.plain_kernels()["priced_layer"].PricedLayer


@examples(60)
@given(SEEDS, profiles(), st.sampled_from([1, 2, 4]), st.booleans())
def test_prices_of_trials_are_those_of_new_layers(seed, profile, num_nodes, is_smooth):
    """One expert after another is out and gets other holders, another one comes in beside it."""
    rng = np.random.default_rng(seed)
    owner_E, topology = rng.integers(8, size=6), Topology.uniform(8, num_nodes)
    costed = layer_search(
        *(owner_E, random_counts_DE(seed, 8, 6), topology, profile), life=ReplicaLife.ITERATION, hides=True
    )
    present_ED = ExpertPlacement.owners_only(owner_E, 8).present_ED | (rng.random((6, 8)) < 0.2)
    layer = PricedLayer(costed, ExpertPlacement(owner_E, present_ED), 8)
    layer.is_smooth = is_smooth

    def price_of_a_new_layer():
        new = PricedLayer(costed, ExpertPlacement(owner_E, np.array(layer.has_ED, np.bool_)), 8)
        new.is_smooth = is_smooth
        return float(new.price())

    def change_a_holder(expert):
        device = rng.choice(np.flatnonzero(np.arange(8) != owner_E[expert]))
        layer.put(expert, device, -1 if layer.has_ED[expert, device] else 1)

    for expert, entering in rng.permuted(np.tile(np.arange(6), (4, 1)), axis=1)[:, :2]:
        layer.count(expert, -1)
        layer.price()
        for _ in range(4):
            change_a_holder(expert)
            assert layer.price_with(expert, -1) == pytest.approx(price_of_a_new_layer(), rel=1e-9)
        layer.count(entering, -1)
        layer.price()
        change_a_holder(entering)
        layer.count(entering, 1)
        assert layer.price_with(expert, entering) == pytest.approx(price_of_a_new_layer(), rel=1e-9)
        layer.count(expert, 1)
        assert layer.price() == pytest.approx(price_of_a_new_layer(), rel=1e-9)
