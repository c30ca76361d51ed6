"""The files of a run folder. ``load(folder).arrays`` has all numbers as NumPy arrays by name."""

from megatron_fssdp.records.recorded_run import RecordedRun, load

__all__ = ["RecordedRun", "load"]
