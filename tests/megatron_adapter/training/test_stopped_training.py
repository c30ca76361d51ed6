"""What a stopped training says about the checkpoint to restart from."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_fssdp.megatron_adapter.training.stopped_training import how_to_go_on

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize("content", [None, bytes(range(256))], ids=["missing", "damaged"])
def test_a_tracker_that_cannot_be_read_leads_to_the_next_folder(
    tmp_path: Path, content: bytes | None
) -> None:
    saved, loaded = tmp_path / "saved", tmp_path / "loaded"
    for folder in (saved, loaded):
        folder.mkdir()
    if content is not None:
        (saved / TRACKER).write_bytes(content)
    (loaded / TRACKER).write_text("10\n")
    words = how_to_go_on(Namespace(save=str(saved), load=str(loaded)))
    assert words == f"The last complete checkpoint is of iteration 10: restart with --load {loaded}"
    (loaded / TRACKER).unlink()
    assert how_to_go_on(Namespace(save=str(saved), load=str(loaded))).startswith("No checkpoint")
