import json
import re

import pytest

from benchmarks.result_file import KEYS, write_result
from tests.support.python_process import ROOT

FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
ROOMS_OF_CODE = ("benchmarks", "scripts", "megatron_fssdp")
TABLE = re.compile(r"<!-- table: results ([\w-]+)")


@pytest.fixture(scope="module")
def named():
    """Names of files in the pages and the code, and of the newest file of each table that pages show."""
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
    code = (path for room in ROOMS_OF_CODE for path in (ROOT / room).rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in (*pages, *code))
    shown = {max(path.name for path in FILES if path.stem[11:] == name) for name in TABLE.findall(text)}
    return shown | {path.name for path in FILES if path.name in text}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_is_the_source_of_something(path, named):
    assert path.name in named, "name it on the page that states its figures, or delete it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_has_the_keys_and_a_cell_for_each_column(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    assert tuple(result) == KEYS
    assert path.name.startswith(result["date"])
    assert result["rows"]
    assert all(len(row) == len(result["columns"]) for row in result["rows"])


def test_a_written_result_has_one_row_on_each_line(tmp_path):
    write_result(tmp_path / "one.json", "How fast?", ["workload", "s"], [("W0", 1.5), ("W1", 2)], "Fast.")
    text = (tmp_path / "one.json").read_text(encoding="utf-8")
    assert '\n  ["W0", 1.5],\n  ["W1", 2]\n' in text
    assert tuple(json.loads(text)) == KEYS
