import math
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.evaluations import (
    EVALUATIONS_FILE,
    Evaluation,
    append_evaluation,
    read_evaluations,
)


def test_evaluations_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_evaluations(tmp_path) == ()
    written = [
        Evaluation(2, "validation", {"lm loss": 5.0, "sop loss": 0.5}),
        Evaluation(4, "validation", {"lm loss": 4.0}),
        Evaluation(4, "test", {"lm loss": 4.5}),
    ]
    for one in written:
        append_evaluation(tmp_path, one)
    assert list(read_evaluations(tmp_path)) == written
    assert written[0].loss == 5.0
    append_evaluation(tmp_path, Evaluation(6, "validation", {"lm loss": math.nan}))
    assert math.isnan(read_evaluations(tmp_path)[-1].loss)


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    for iteration, data, loss in (
        (2, "validation", 5),
        (4, "validation", 4),
        (4, "test", 4),
        (6, "validation", 3),
    ):
        append_evaluation(tmp_path, Evaluation(iteration, data, {"lm loss": float(loss)}))
    append_evaluation(tmp_path, Evaluation(4, "validation", {"lm loss": 1.0}))
    found = [(one.iteration, one.data, one.loss) for one in read_evaluations(tmp_path)]
    assert found == [(2, "validation", 5.0), (4, "test", 4.0), (4, "validation", 1.0)]


def test_damaged_lines_are_named_and_a_half_written_one_is_left_out(tmp_path: Path) -> None:
    append_evaluation(tmp_path, Evaluation(2, "validation", {"lm loss": 5.0}))
    path = tmp_path / EVALUATIONS_FILE
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    assert len(read_evaluations(tmp_path)) == 1
    path.write_text(whole[:20] + "\n" + whole)
    with pytest.raises(ConfigurationError, match="line 1 is damaged"):
        read_evaluations(tmp_path)
