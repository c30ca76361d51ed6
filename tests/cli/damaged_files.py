"""Ways to damage files: each entry damages a valid file."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.records.row_files import rows_in, save_rows

Damage = Callable[[Path], object]


def _replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: 2 * len(content) // 3])


ANY_FILE: dict[str, Damage] = {
    "missing": Path.unlink,
    "folder": _replaced_by_folder,
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
}


def _including_itself(path: Path) -> None:
    path.write_text(f"include: [{path.name}]\n{path.read_text()}")


def _including_ever_more(path: Path) -> None:
    for number in range(30):
        below = f"{number + 1}.yaml"
        (path.parent / f"{number}.yaml").write_text(f"include: [{below}, {below}]")
    (path.parent / "30.yaml").write_text("")
    path.write_text(f"include: [0.yaml]\n{path.read_text()}")


def _alias_bomb(path: Path) -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    path.write_text("\n".join(lines))


def _added(text: str) -> Damage:
    def add(path: Path) -> None:
        path.write_text(f"{path.read_text()}\n{text}\n")

    return add


YAML_FILE: dict[str, Damage] = ANY_FILE | {
    "empty": lambda path: path.write_text(""),
    "half": lambda path: path.write_text("model: {num_layers: 4, hidden"),
    "list": lambda path: path.write_text("- a\n- b"),
    "unknown key": _added("modle: {}"),
    "duplicate key": _added("same: 1\nsame: 2"),
    "key of a number": _added("1: 2"),
    "key of a date": _added("2026-01-01: x"),
    "aliases": _alias_bomb,
    "nested": lambda path: path.write_text("a: " + "[" * 2000),
    "huge": lambda path: path.write_text("a: [" + "1, " * (1 << 20) + "1]"),
    "latin-1": lambda path: path.write_bytes("name: Käse".encode("latin-1")),
    "not finite": _added("x: .inf"),
    "beyond 64 bits": _added(f"x: {1 << 64}"),
    "tag": _added("x: !!bool perhaps"),
    "python object": _added("x: !!python/object/apply:os.getcwd []"),
    "null byte": _added('"a\\0b": 1'),
    "half a surrogate": _added('x: "\\ud800"'),
}
"""For files of every kind of settings."""

RUN_FILE: dict[str, Damage] = YAML_FILE | {
    "includes itself": _including_itself,
    "includes ever more": _including_ever_more,
    "includes a null byte": _added('include: ["a\\0b"]'),
    "includes a folder": _added("include: [.]"),
    "wrong type": lambda path: path.write_text(path.read_text().replace("num_layers: 4", "num_layers: four")),
    "no ranks": lambda path: path.write_text(
        path.read_text().replace("expert_model_parallel_size: 4", "expert_model_parallel_size: 0")
    ),
    "negative": lambda path: path.write_text(path.read_text().replace("num_layers: 4", "num_layers: -4")),
}
"""For the YAML of a run; what is good has four layers and four expert-parallel ranks."""


def _changed(**changes: Callable[[np.ndarray], np.ndarray]) -> Damage:
    def change(path: Path) -> None:
        content = rows_in(path)
        save_rows(
            path, **{name: changes.get(name, lambda kept: kept)(kept) for name, kept in content.items()}
        )

    return change


def _without_counts(path: Path) -> None:
    content = rows_in(path)
    del content["counts_ILDE"]
    save_rows(path, **content)


def _pickled(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def _one_array(path: Path) -> None:
    np.save(path, np.arange(8))


def _flipped(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    for at in range(60, len(damaged) // 2, 7):
        damaged[at] ^= 0xFF
    path.write_bytes(damaged)


LOADS_FILE: dict[str, Damage] = ANY_FILE | {
    "empty": lambda path: path.write_bytes(b""),
    "cut": _cut,
    "flipped": _flipped,
    "pickle": lambda path: path.write_bytes(pickle.dumps({"counts_ILDE": 1})),
    "pickled array": _pickled,
    "one array": _one_array,
    "text": lambda path: path.write_text("counts"),
    "no counts": _without_counts,
    "wrong shape": _changed(counts_ILDE=lambda counts: counts[..., 0]),
    "other layers": _changed(layers=lambda numbers: numbers + np.arange(2)[:, None]),
    "not ascending": _changed(iterations=lambda numbers: numbers[::-1]),
    "floats": _changed(counts_ILDE=lambda counts: counts.astype(np.float64)),
    "not a number": _changed(counts_ILDE=lambda counts: np.full(counts.shape, np.nan)),
    "negative": _changed(counts_ILDE=lambda counts: -counts),
    "no experts": _changed(counts_ILDE=lambda counts: counts[..., :0]),
    "same layers": _changed(layers=lambda numbers: numbers * 0),
    "strings": _changed(layers=lambda numbers: numbers.astype(str)),
}
"""For ``loads.npy``."""

METRICS_FILE: dict[str, Damage] = ANY_FILE | {
    "empty": lambda path: path.write_text(""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[40:]),
    "a list": lambda path: path.write_text("[]\n"),
    "a word": lambda path: path.write_text("iteration\n"),
    "strings": lambda path: path.write_text(path.read_text().replace('"iteration": 1', '"iteration": "1"')),
    "negative": lambda path: path.write_text(path.read_text().replace('"iteration": 1', '"iteration": -1')),
    "huge": lambda path: path.write_text(
        path.read_text().replace('"iteration": 1', '"iteration": 1' + "0" * 30)
    ),
    "not finite": lambda path: path.write_text(
        path.read_text().replace('"iteration_s": 1.0', '"iteration_s": NaN')
    ),
    "nested": lambda path: path.write_text("[" * 100_000 + "\n"),
    "no layers": lambda path: path.write_text(path.read_text().replace('"layers": [', '"layers": [3, ')),
}
"""For ``metrics.jsonl``."""


def contents(folder: Path) -> dict[str, bytes | None]:
    """Contents of all files below a folder by relative path; ``None`` for folders."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def copied(source: Path, target: Path) -> Path:
    """Copy a file into a new folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
    return target
