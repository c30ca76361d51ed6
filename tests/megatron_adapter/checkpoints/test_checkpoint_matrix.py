"""Training resumes from every checkpoint under every strategy and expert-parallel size.

Reader and writer are Megatron alone, ``ep``, ``fssdp`` before its first re-shard (``even``) and
``fssdp`` that re-shards: a writer before its save, a reader in the iterations after its load
(``moved``).
Adam's learning rate is high and its averages are short, so that a wrong state shows in a few
iterations.

Megatron itself cannot resume the optimizer between EP 1 and larger EP sizes, because it chains a
different number of optimizers. In these cases only the model is loaded, and the reference is a run
of stock Megatron that does the same.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.planning.placement.owner_map import OwnerMap

from ..training_run import TrainingRun, relative_difference, train

LAYOUT = (
    "--ckpt-format torch_dist --train-iters 8 --disable-bias-linear --adam-beta1 0.8 --adam-beta2 0.9 "
    "--lr 5e-3"
)
SAVED_AT = 4
OPTIMIZERS = {"plain": "", "distributed": "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"}
_FSSDP = (
    "--moe-strategy fssdp --moe-strategy-set slots=2 --moe-strategy-set overlap_degree=2 "
    "--moe-strategy-set reshard_interval="
)
# A run of 8 iterations re-shards before the 4th and the 7th, or never.
STRATEGIES = {
    "none": "",
    "ep": "--moe-strategy ep",
    "even": f"{_FSSDP}100",
    "moved": f"{_FSSDP}3",
}
STATES = [(name, size) for name in STRATEGIES for size in (1, 2, 4) if (name, size) != ("moved", 1)]

# (optimizer, writer, its EP, reader, its EP)
Cell = tuple[str, str, int, str, int]

SHORT: list[Cell] = [("distributed", "moved", 2, "none", 2), ("distributed", "moved", 2, "moved", 4)]
CELLS: list[Cell] = [("distributed", *writer, *reader) for writer in STATES for reader in STATES] + [
    ("plain", writer, writer_size, reader, reader_size)
    for writer, reader in product(("none", "moved"), repeat=2)
    for writer_size, reader_size in product((2, 4), repeat=2)
]


class Shelf:
    """Checkpoints and their reference runs; each is made once."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        self.data = data
        self._made: dict[Any, Any] = {}

    def written(self, optimizer: str, strategy: str, size: int) -> Path:
        """A checkpoint of iteration 4."""
        folder = self.folder / f"{optimizer}-{strategy}-{size}"
        if not folder.exists():
            arguments = f"--save {folder} --save-interval {SAVED_AT} --exit-interval {SAVED_AT}"
            self._train(optimizer, strategy, size, arguments)
            hint = _hint(folder)
            assert (hint is not None) == (strategy == "moved")
        return folder

    def wanted(self, optimizer: str, written_size: int, read_size: int) -> TrainingRun:
        """The losses of stock Megatron; from a run without a break where Megatron can resume exactly."""
        crosses = (written_size == 1) != (read_size == 1)
        key = (optimizer, written_size, read_size if crosses else None)
        if key not in self._made:
            self._made[key] = (
                self.read((optimizer, "none", written_size, "none", read_size))
                if crosses
                else self._train(optimizer, "none", written_size, "")
            )
        return self._made[key]

    def read(self, cell: Cell, more: str = "") -> TrainingRun:
        """Load a checkpoint and continue to iteration 8."""
        optimizer, writer, written_size, reader, size = cell
        arguments = f"--load {self.written(optimizer, writer, written_size)} {more}"
        if (written_size == 1) != (size == 1):
            arguments += " --no-load-optim"
        return self._train(optimizer, reader, size, arguments)

    def _train(self, optimizer: str, strategy: str, size: int, arguments: str) -> TrainingRun:
        layout = f"{LAYOUT} {OPTIMIZERS[optimizer]} --expert-model-parallel-size {size}"
        return train(size, f"{layout} {STRATEGIES[strategy]} {arguments}", self.data)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory, text_data: Path) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"), text_data)


def _name(cell: Cell) -> str:
    optimizer, writer, written_size, reader, size = cell
    return f"{optimizer}-{writer}_ep{written_size}-{reader}_ep{size}"


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[pytest.mark.slow] * (cell not in SHORT)) for cell in CELLS], ids=_name
)
def test_training_resumes_with_the_same_losses(cell: Cell, shelf: Shelf) -> None:
    optimizer, _, written_size, _, size = cell
    wanted = shelf.wanted(optimizer, written_size, size)
    rest = shelf.read(cell)
    assert len(rest.losses) == 8 - SAVED_AT
    assert relative_difference(rest.losses, wanted.losses[-len(rest.losses) :]) <= 1e-5
    assert relative_difference(rest.grad_norms, wanted.grad_norms[-len(rest.losses) :]) <= 1e-4


@pytest.mark.parametrize(
    "optimizer",
    [name if name == "distributed" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS],
)
def test_the_comparison_detects_a_lost_optimizer_state(optimizer: str, shelf: Shelf) -> None:
    rest = shelf.read((optimizer, "moved", 2, "none", 2), "--no-load-optim")
    wanted = shelf.wanted(optimizer, 2, 2)
    assert rest.losses[0] == pytest.approx(wanted.losses[SAVED_AT], rel=1e-6)
    assert relative_difference(rest.losses, wanted.losses[SAVED_AT:]) > 1e-3


def _hint(folder: Path) -> Any:
    """The owner map in a checkpoint, which is uneven if there is one."""
    from megatron.core import dist_checkpointing

    from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_hints import OwnerHint

    hint = dist_checkpointing.load_common_state_dict(str(folder / f"iter_{SAVED_AT:07d}")).get(OwnerHint.key)
    if hint is not None:
        assert any(not OwnerMap.from_lists(stage).is_even for stage in hint["stages"])
    return hint


# name: (ranks, arguments). The default format is dp_reshardable; ranks / EP replicas of each expert.
DISTRIBUTED_OPTIMIZERS = {
    "edp1": (2, "--expert-model-parallel-size 2"),
    "edp2_bf16": (2, "--expert-model-parallel-size 1 --bf16 --disable-bias-linear"),
    "edp2_of_4_fully_reshardable": (
        4,
        "--expert-model-parallel-size 2 --dist-ckpt-optim-fully-reshardable --moe-strategy fssdp",
    ),
    "edp1_bf16_fully_reshardable": (
        2,
        "--expert-model-parallel-size 2 --dist-ckpt-optim-fully-reshardable --bf16 --moe-strategy ep",
    ),
    "padded_buckets_fully_reshardable": (
        2,
        "--expert-model-parallel-size 2 --dist-ckpt-optim-fully-reshardable --moe-strategy none "
        "--overlap-grad-reduce --ddp-bucket-size 5000",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTED_OPTIMIZERS)
def test_the_distributed_optimizer_resumes_exactly(name: str, text_data: Path, tmp_path: Path) -> None:
    world_size, layout = DISTRIBUTED_OPTIMIZERS[name]
    layout = (
        f"{layout} --use-distributed-optimizer --ckpt-format torch_dist --train-iters 8 "
        # The learning rate is such that a wrong step count shows in Adam's bias correction.
        "--adam-beta1 0.8 --adam-beta2 0.9"
    )
    whole = train(world_size, layout, text_data)
    begun = train(world_size, f"{layout} --exit-interval 4 --save {tmp_path} --save-interval 4", text_data)
    assert begun.losses == whole.losses[:4]
    rest = train(world_size, f"{layout} --load {tmp_path}", text_data)
    # A resumed fssdp has no load history yet and thus no replicas in its first iteration: the sums
    # of the experts' gradients are formed in another order.
    tolerance = 1e-6 if "fssdp" in layout else 0.0
    assert relative_difference(rest.losses, whole.losses[4:]) <= tolerance
    assert relative_difference(rest.grad_norms, whole.grad_norms[4:]) <= tolerance
