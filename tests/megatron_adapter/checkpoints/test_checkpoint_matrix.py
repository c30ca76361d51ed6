"""Training resumes from every checkpoint under every strategy and expert-parallel size.

Reader and writer are Megatron alone, ``ep``, ``fssdp`` before its first re-shard (``even``) and ``fssdp``
that re-shards: a writer before its save, a reader after its load (``moved``). Adam's learning rate is high
and its averages are short, so that a wrong state shows in a few iterations.

Megatron itself cannot resume the optimizer between EP 1 and larger sizes, because it chains another number of
optimizers. Then only the model is loaded, and the reference is a run of stock Megatron that does the same.
"""

from functools import cache
from itertools import product

import pytest
from megatron.core import dist_checkpointing

from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_hints import OwnerHint
from megatron_fssdp.planning.placement.owner_map import OwnerMap

from ..training_run import assert_close, train

COMMON = "{TORCH_DIST} --train-iters 6 {GATED} {SHORT_AVERAGES} --lr 5e-3"
SAVED_AT = 3
OPTIMIZERS = {"plain": "", "distributed": "{RESHARDABLE}"}
# A run of 6 iterations re-shards before the 3rd and the 5th, or never.
STRATEGIES = {
    "none": "none",
    "ep": "ep",
    "even": "fssdp slots=2 overlap_degree=2 reshard_interval=100",
    "moved": "fssdp slots=2 overlap_degree=2 reshard_interval=2",
}
STATES = [(name, size) for name in STRATEGIES for size in (1, 2, 4) if (name, size) != ("moved", 1)]

# Optimizer, writer and its expert-parallel size, reader and its size.
SHORT = [("distributed", "moved", 2, "none", 2), ("distributed", "moved", 2, "moved", 4)]
CELLS = [("distributed", *writer, *reader) for writer in STATES for reader in STATES] + [
    ("plain", writer, writer_size, reader, reader_size)
    for writer, reader in product(("none", "moved"), repeat=2)
    for writer_size, reader_size in product((2, 4), repeat=2)
]


class Shelf:
    """Checkpoints of iteration 3 and reference runs; each is made once."""

    def __init__(self, folder, data):
        self.folder, self.data = folder, data
        self._train, self.written = cache(self._train), cache(self.written)

    def written(self, optimizer, strategy, size):
        folder = self.folder / f"{optimizer}-{strategy}-{size}"
        saving = f"--save {folder} --save-interval {SAVED_AT} --exit-interval {SAVED_AT}"
        self._train(optimizer, strategy, size, saving)
        common = dist_checkpointing.load_common_state_dict(str(folder / f"iter_{SAVED_AT:07d}"))
        assert (OwnerHint.key in common) == (strategy == "moved")
        for stage in common.get(OwnerHint.key, {"stages": []})["stages"]:
            assert not OwnerMap.from_lists(stage).is_even
        return folder

    def wanted(self, optimizer, written_size, read_size):
        """Stock Megatron; from a run without a break where Megatron can resume exactly."""
        if (written_size == 1) != (read_size == 1):
            return self.read((optimizer, "none", written_size, "none", read_size))
        return self._train(optimizer, "none", written_size, "")

    def read(self, cell):
        """Load a checkpoint and continue to iteration 6."""
        optimizer, writer, written_size, reader, size = cell
        more = "--no-load-optim" if (written_size == 1) != (size == 1) else ""
        folder = self.written(optimizer, writer, written_size)
        return self._train(optimizer, reader, size, f"--load {folder} {more}")

    def _train(self, optimizer, strategy, size, arguments):
        layout = f"{COMMON} {OPTIMIZERS[optimizer]} --expert-model-parallel-size {size} {arguments}"
        return train(size, layout, self.data, strategy=STRATEGIES[strategy])


@pytest.fixture(scope="session")
def shelf(tmp_path_factory, text_data):
    return Shelf(tmp_path_factory.mktemp("shelf"), text_data)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[pytest.mark.slow] * (cell not in SHORT)) for cell in CELLS],
    ids="{0[0]}-{0[1]}_ep{0[2]}-{0[3]}_ep{0[4]}".format,
)
def test_training_resumes_with_the_same_losses(cell, shelf):
    optimizer, writer, written_size, reader, size = cell
    rest, wanted = shelf.read(cell), shelf.wanted(optimizer, written_size, size)
    if (writer, reader) == ("moved", "moved") and size != written_size:
        for hint in ("owners", "loads"):
            assert sum(f"{hint} are not used" in message for message in rest.messages) == 1
    assert len(rest.losses) == 6 - SAVED_AT
    assert_close(rest, wanted, since=len(wanted.losses) - len(rest.losses))
