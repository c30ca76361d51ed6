"""What repeats is computed once; the results must be those of computing it every time."""

import numpy as np
import pytest

from megatron_fssdp.simulation import replay
from megatron_fssdp.simulation.layer_record import LayerPrices, LayerRecord
from megatron_fssdp.strategies.layer_plan import LastResults
from tests.simulation.small_jobs import outcome_of


@pytest.mark.parametrize(
    "name", ["ep", "fssdp", "prophet", "fastermoe", "quota", "smartmoe", "flexmoe", "auto"]
)
def test_results_are_those_of_computing_everything_anew(name, monkeypatch):
    rng = np.random.default_rng(0)
    loads = [rng.multinomial(16, rng.dirichlet(np.full(8, 0.4)), size=(2, 4)) for _ in range(2)]
    # The loads repeat, so that replicas are renewed under equal ones, jump once, and return.
    counts_ILDE = np.array([*[loads[0]] * 40, *[loads[1]] * 5, *[loads[0]] * 5], np.int32)
    kept = outcome_of(name, counts_ILDE, tokens_per_micro_batch=16)
    monkeypatch.setattr(LastResults, "of", lambda self, context, plan, numbers, make: make())
    monkeypatch.setattr(
        LayerPrices,
        "_known_layer",
        lambda self, number, layer, decision, times: LayerRecord(
            **self._of_plan(layer, decision, times, is_first=not number),
            **self._of_loads(layer, decision, times),
        ),
    )
    monkeypatch.setattr(
        replay, "_repeated_ZL", lambda counts_IZLDE, _: np.zeros(counts_IZLDE.shape[1:3], int)
    )
    anew = outcome_of(name, counts_ILDE, tokens_per_micro_batch=16)
    for part, seconds_I in kept.parts_s.items():
        assert seconds_I.tolist() == anew.parts_s[part].tolist()
    assert np.array_equiv(kept.tokens_ILD, anew.tokens_ILD)
    assert kept.memory == anew.memory
