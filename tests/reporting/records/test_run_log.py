from pathlib import Path

from megatron_fssdp.launch.run_folder import RunFolder
from megatron_fssdp.reporting.records.run_log import RunLog, read_log


def test_the_log_states_memory_and_every_stop(tmp_path: Path) -> None:
    assert read_log(tmp_path) == RunLog()
    log = tmp_path / "log.txt"
    log.write_bytes(
        b"[default0]:x [fssdp] memory of a rank: 1\n\xff\n[default0]:[fssdp] memory of a rank: 2\n"
    )
    RunFolder(tmp_path).note_stop(5, "interrupted by Ctrl-C")
    RunFolder(tmp_path).note_stop(0, "rank 1: ValueError: no")
    assert read_log(tmp_path) == RunLog("2", ("5: interrupted by Ctrl-C", "0: rank 1: ValueError: no"))
