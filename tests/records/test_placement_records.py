from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.loads import LoadsWriter
from megatron_fssdp.records.placements import PlacementsWriter, read_placements

# 11 devices do not fill a whole number of bytes.
NUM_LAYERS, NUM_EXPERTS, NUM_DEVICES = 2, 5, 11


def entry(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    owner_LE = rng.integers(0, NUM_DEVICES, (NUM_LAYERS, NUM_EXPERTS))
    owned_LED = owner_LE[:, :, None] == np.arange(NUM_DEVICES)
    present_LED = owned_LED | (rng.random(owned_LED.shape) < 0.3)
    tokens = rng.integers(0, 1000, (2, NUM_LAYERS, NUM_DEVICES))
    return owned_LED, present_LED, tokens[0], tokens[1]


def test_placements_round_trip_and_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    with closing(PlacementsWriter(tmp_path, [1, 3])) as writer:
        for iteration in (1, 2, 3):
            writer.append(iteration, *entry(iteration))
    with closing(PlacementsWriter(tmp_path, [1, 3])) as writer:
        writer.append(3, *entry(33))
    found = read_placements(tmp_path)
    assert (found.iterations.tolist(), found.layers.tolist()) == ([1, 2, 3], [1, 3])
    for i, seed in enumerate((1, 2, 33)):
        owned_LED, present_LED, ep_LD, tokens_LD = entry(seed)
        np.testing.assert_array_equal(found.owned_ILED[i], owned_LED)
        np.testing.assert_array_equal(found.present_ILED[i], present_LED)
        np.testing.assert_array_equal(found.ep_tokens_ILD[i], ep_LD)
        np.testing.assert_array_equal(found.tokens_ILD[i], tokens_LD)
        np.testing.assert_array_equal(found.replicas_IL[i], (present_LED & ~owned_LED).sum(axis=(1, 2)))


def test_records_that_do_not_fit_or_are_inconsistent_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        read_placements(tmp_path)
    owned_LED, present_LED, ep_LD, tokens_LD = entry(1)
    with closing(PlacementsWriter(tmp_path, [1, 3])) as writer:
        writer.append(1, owned_LED, present_LED, ep_LD, tokens_LD)
        with pytest.raises(ConfigurationError, match="choose another output folder"):
            writer.append(2, owned_LED[:, :3], present_LED[:, :3], ep_LD, tokens_LD)
    with pytest.raises(ConfigurationError, match="holds layers"):
        PlacementsWriter(tmp_path, [1, 2])
    with closing(PlacementsWriter(tmp_path / "absent", [1, 3])) as writer:
        writer.append(1, owned_LED, present_LED & ~owned_LED, ep_LD, tokens_LD)
    with pytest.raises(ConfigurationError, match="not present on its owner"):
        read_placements(tmp_path / "absent")
    with closing(LoadsWriter(tmp_path / "other", [1])) as loads:
        loads.append(1, np.ones((1, 2, 3)))
    (tmp_path / "other" / "loads.npy").rename(tmp_path / "other" / "placements.npy")
    with pytest.raises(ConfigurationError, match="not a record of a run"):
        read_placements(tmp_path / "other")
