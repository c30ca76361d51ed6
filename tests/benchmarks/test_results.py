import json
from pathlib import Path

import pytest

from benchmarks.result_file import KEYS, write_result

FILES = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_has_the_keys_and_a_cell_for_each_column(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert tuple(found) == KEYS
    assert path.name.startswith(found["date"])
    assert found["rows"]
    assert all(len(row) == len(found["columns"]) for row in found["rows"])


def test_a_written_result_has_one_row_on_each_line(tmp_path: Path) -> None:
    write_result(tmp_path / "one.json", "How fast?", ["workload", "s"], [("W0", 1.5), ("W1", 2)], "Fast.")
    text = (tmp_path / "one.json").read_text(encoding="utf-8")
    assert '\n  ["W0", 1.5],\n  ["W1", 2]\n' in text
    assert tuple(json.loads(text)) == KEYS
