"""A run is killed while it saves: the previous checkpoint stays usable."""

import multiprocessing
import os
import signal

import pytest
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_hints import save_with_new_marks
from megatron_fssdp.testing.ranks import RankError

from ..training_run import train, wrap

SAVING = "{EP2} {TORCH_DIST} --no-load-rng --no-save-rng --train-iters 4 --save-interval 2"


@pytest.mark.slow
def test_a_checkpoint_that_is_being_overwritten_does_not_count_as_complete(text_data, tmp_path):
    losses = train(2, f"{SAVING} --save {tmp_path}", text_data).losses
    again = f"{SAVING} --load {tmp_path} --ckpt-step 2 --save {tmp_path}"
    with pytest.raises(RankError):
        train(2, again, text_data, before=take_marks_and_die_in_save)
    # Megatron named this checkpoint the latest when it was complete.
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert list((tmp_path / "iter_0000004").glob("*.distcp"))
    with pytest.raises(RankError, match=r"unknown checkpoint format in .*iter_0000004"):
        train(2, f"{SAVING} --load {tmp_path}", text_data)
    assert train(2, again, text_data).losses == losses[2:]
    assert train(2, f"{SAVING} --load {tmp_path}", text_data).losses == (), "iteration 4 is there again"


def take_marks_and_die_in_save():
    """Kill rank 1 when it has written its data, in a folder whose completion marks are removed first."""

    def retrieve(results, writer):
        written = results(writer)
        for child in multiprocessing.active_children():  # writer processes would outlive a killed parent
            child.kill()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    wrap(dist_checkpointing, "save", save_with_new_marks)
    wrap(FileSystemWriterAsync, "retrieve_write_results", retrieve)
