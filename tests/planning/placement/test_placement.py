import pickle

import numpy as np
import pytest

from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from tests.support.random_placement import with_replicas


def test_arrays_are_copied_and_read_only():
    owner_E, present_ED = np.array([0, 1], dtype=np.int32), np.eye(2, dtype=bool)
    placement = ExpertPlacement(owner_E, present_ED)
    owner_E[0] = 1
    assert placement.owner_E.tolist() == [0, 1]
    assert placement.owner_E.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        placement.present_ED[0, 1] = True


def test_equality_hash_and_digest_are_by_value():
    present_ED = np.array([[1, 0, 1], [1, 0, 0], [0, 1, 0], [1, 1, 1]], dtype=bool)
    placement = ExpertPlacement(np.array([0, 0, 1, 2]), present_ED)
    same = ExpertPlacement(placement.owner_E.astype(np.int32), np.asfortranarray(placement.present_ED))
    larger = with_replicas(placement, [(1, 1)])
    assert placement == same
    assert hash(placement) == hash(same)
    assert placement.digest() == same.digest()
    assert placement != larger
    assert placement.digest() != larger.digest()
    assert placement != "placement"
    assert pickle.loads(pickle.dumps(placement)) == placement


def test_even_owners_are_contiguous():
    assert even_owners(6, 3).tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="6 experts cannot be shared evenly by 4 devices"):
        even_owners(6, 4)


@pytest.mark.parametrize(
    ("owner_E", "present_ED", "message"),
    [
        ([0.0], [[True]], "dtype float64, and present_ED"),
        ([0, 1], [[True, True]], r"present_ED of shape \(1, 2\)"),
        ([0], [[1.0]], "dtype float64: wanted one integer"),
        ([0, 2], np.ones((2, 2), bool), "expert 1 is owned by device 2: wanted a device from 0 to 1"),
        ([0, 1], [[True, False], [True, False]], "expert 1 is not present on its owner, device 1"),
    ],
)
def test_bad_placements_say_what_was_wanted(owner_E, present_ED, message):
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(np.array(owner_E), np.array(present_ED))
