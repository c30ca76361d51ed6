"""A long training with kills and resumes loses nothing, and its ranks do not grow.

``FSSDP_SOAK_ITERATIONS=3000`` trains longer than the default.
"""

import os
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.records.metrics import read_metrics
from megatron_fssdp.testing.ranks import RankError

from ..training_run import before_iterations, note, train

ITERATIONS = int(os.environ.get("FSSDP_SOAK_ITERATIONS", "300"))
NUM_SAVES = 15
KILLED_IN = (int(0.37 * ITERATIONS), int(0.73 * ITERATIONS))
STRATEGY = "fssdp slots=2 overlap_degree=3 reshard_interval=7"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def watch():
    """Note rank, iteration, resident bytes, threads and open files before some iterations."""

    def measure(iteration, *_):
        if iteration % max(ITERATIONS // 30, 1) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            counts = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
            note((int(os.environ["RANK"]), iteration, pages * PAGE_BYTES, *counts))

    before_iterations(measure)


def die_in(last):
    """Kill rank 1 before an iteration."""

    def die(iteration, *_):
        if iteration == last and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    before_iterations(die)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_long_training_survives_kills_and_stays_level(text_data, tmp_path):
    every = ITERATIONS // NUM_SAVES
    arguments = f"{{EP4}} {{RESHARDABLE}} {{TORCH_DIST}} --train-iters {ITERATIONS} --save-interval {every}"

    def folders(name):
        folder = tmp_path / name
        return f"--save {folder} --load {folder} {arguments} --moe-strategy-set record_dir={folder}"

    options = {"strategy": STRATEGY, "timeout_s": 30 + 2.0 * ITERATIONS}
    whole = train(4, folders("whole"), text_data, before=watch, **options)
    for last in KILLED_IN:
        with pytest.raises(RankError, match="signal 9"):
            train(4, folders("killed"), text_data, before=partial(die_in, last), **options)
    resumed = train(4, folders("killed"), text_data, **options)
    assert len(resumed.losses) == ITERATIONS - (KILLED_IN[-1] - 1) // every * every
    of_whole, of_killed = (read_metrics(tmp_path / name) for name in ("whole", "killed"))
    assert [entry.iteration for entry in of_killed] == [*range(1, ITERATIONS + 1)]
    assert [entry.lm_loss for entry in of_killed] == [entry.lm_loss for entry in of_whole]
    # Megatron divides in fp32 what it prints; records add up in fp64.
    assert [entry.lm_loss for entry in of_whole] == pytest.approx(list(whole.losses), rel=1e-6)
    assert sum(entry.resharded_experts > 0 for entry in of_whole) > 3
    # After a fifth of the iterations, allocators and caches are warm.
    ranks, iterations, resident, threads, files = np.array(whole.notes).T
    for rank in range(4):
        warm = (ranks == rank) & (iterations > ITERATIONS / 5)
        print(rank, resident[warm] / 2**20, threads[warm], files[warm])
        assert resident[warm].max() <= 1.02 * resident[warm][0]
        assert threads[warm].max() <= threads[warm][0]
        assert files[warm].max() <= files[warm][0]
    shutil.rmtree(tmp_path / "whole")
