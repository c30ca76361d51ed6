"""Strange bytes and YAML are tested once, at the loaders."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.megatron_adapter.entry.launcher import launch
from tests.support.python_process import ROOT

from ..full_disk import room_for
from ..launch.tiny_run import fake_data
from ..report.made_runs import write_made_run

CONFIGS = ROOT / "configs"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with one valid file of every kind; the rows below name the files relative to it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "place"
    place.mkdir()
    fake_data(place / "data")
    shutil.copy(CONFIGS / "gpt_moe_tiny.yaml", place / "run.yaml")
    shutil.copy(CONFIGS / "clusters" / "hpwnv.yaml", place / "cluster.yaml")
    (place / "text.txt").write_text("some words " * 20)
    (place / "strategy.yaml").write_text("slots: 2\n")
    done = write_made_run(place / "done", num_iterations=2, num_layers=4)
    shutil.copy(CONFIGS / "gpt_moe_tiny.yaml", done / "config.yaml")
    (done / "checkpoints").mkdir()
    (done / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n")
    monkeypatch.chdir(place)
    return place


def train(*more):
    return ("train", "run.yaml", "--set", "data.path=data", *more)


RESUME = train("--out", "done", "--resume")
SIMULATE = (
    *("simulate", "--loads", "done", "--cluster", "cluster.yaml", "--cluster-set", "devices_per_node=2"),
    *("--model", "run.yaml", "--out", "new", "--no-plots"),
)
ONE_RANK = ("--set", "parallelism.expert_model_parallel_size=1")
REPORT = ("report", "done")
PROFILE = ("profile", "--nproc", 2, "--out", "new.yaml", "--model", "run.yaml")
BUILD = ("data", "build", "text.txt", "--out", "new", "--tokenizer", "bytes")

# The files that each command reads. Valid files are tested elsewhere.
READERS = [
    (train("--out", "new"), "run.yaml"),
    (train("--out", "new"), "data/manifest.json"),
    (RESUME, "done/config.yaml"),
    (RESUME, "done/checkpoints/latest_checkpointed_iteration.txt"),
    (PROFILE, "run.yaml"),
    (SIMULATE, "cluster.yaml"),
    (SIMULATE, "done/loads.npy"),
    (REPORT, "done/metrics.jsonl"),
]


@pytest.mark.parametrize(
    ("arguments", "file"), READERS, ids=lambda value: value[0] if isinstance(value, tuple) else value
)
def test_a_damaged_file_gives_one_line_and_changes_nothing(place, command, arguments, file):
    (place / file).write_bytes(bytes(range(256)))
    before = contents(place)
    code, out, err = command(*arguments)
    assert_refused(code, out, err)
    assert Path(file).name in err or str(Path(file).parent) in err
    assert contents(place) == before


@pytest.mark.parametrize(
    ("arguments", "named"),  # the words that the line has: options, values and files
    [
        # numbers
        (train("--nproc", "four"), "--nproc"),
        ((*SIMULATE, "--loads", "W0", "--iterations", 10**12), "--iterations"),
        ((*SIMULATE, "--cluster-set", "num_nodes=0"), "--cluster-set num_nodes 0"),
        ((*SIMULATE, "--strategies", ","), "--strategies"),
        ((*BUILD, "--tokenizer", "bpe", "--vocab-size", -1), "--vocab-size -1"),
        # names and files that do not exist
        (("train", "nowhere.yaml"), "nowhere.yaml"),
        (("train", "done"), "done:"),
        (("train",), "CONFIG.yaml"),
        ((*SIMULATE, "--loads", "nowhere"), "--loads 'nowhere'"),
        ((*SIMULATE, "--loads", "W33"), "--loads 'W33' 'W3'"),
        ((*SIMULATE, "--strategies", "ep,fsdp"), "'fsdp' 'fssdp'"),
        ((*SIMULATE, "--moe-strategy-set", "slot=2"), "--moe-strategy-set 'slot' 'slots'"),
        ((*SIMULATE, "--set", "model.num_experts=null", *ONE_RANK), "num_experts"),
        (("report", "nowhere"), "nowhere: no such file or folder"),
        (("report", "data"), "data: has no records"),
        (("report", "done/metrics.jsonl"), "done/metrics.jsonl:"),
        (("compare", "done", "done/../done"), "compare: twice"),
        ((*SIMULATE, "--cluster", "nowhere"), "cluster 'nowhere'"),
        (("report", "done", "--out", "run.yaml/below.html"), "--out run.yaml"),
        (("report", "done", "--out", "done"), "--out done:"),
        (("configs", "nowhere.yaml"), "nowhere.yaml"),
        (("data", "build", "nowhere", "--out", "new"), "nowhere:"),
        (("frobnicate",), "'frobnicate'"),
        # outputs that cannot be written
        ((*SIMULATE, "--out", "run.yaml"), "--out run.yaml:"),
        *(
            ((*words, "--out", "/proc/none/x"), "--out /proc/none/x: /proc,")
            for words in (("train", "run.yaml"), SIMULATE, REPORT, PROFILE, BUILD)
        ),
        # outputs that are somebody else's
        ((*PROFILE, "--out", "cluster.yaml"), "--out cluster.yaml:"),
        (("report", "done", "--out", "text.txt"), "--out text.txt:"),
        ((*SIMULATE, "--out", "."), "--out .: --cluster cluster.yaml"),
        (("data", "build", "data", "--out", "data"), "--out data:"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_arguments_give_one_line_and_change_nothing(place, command, arguments, named):
    before = contents(place)
    code, out, err = command(*arguments)
    assert_refused(code, out, err)
    assert all(word in err for word in named.split())
    assert contents(place) == before


@pytest.mark.parametrize("name", ["counts.csv", "counts.npy", "done/loads.npy"])
def test_a_file_without_permission_gives_one_line(place, command, monkeypatch, name):
    def refusing(opener):
        def opened(file, *more, **options):
            if str(file).endswith(name):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
            return opener(file, *more, **options)

        return opened

    (place / name).touch()
    monkeypatch.setattr(Path, "open", refusing(Path.open))
    monkeypatch.setattr(np.lib.format, "open_memmap", refusing(np.lib.format.open_memmap))
    loads = name.removesuffix("/loads.npy")
    code, out, err = command("simulate", "--loads", loads, *SIMULATE[3:])
    assert_refused(code, out, err)
    assert f"{name}: permission denied" in err


@pytest.mark.parametrize(
    ("arguments", "room_bytes"),
    [(train("--out", "new"), 100), (SIMULATE, 100), (SIMULATE, 2000), (REPORT, 1000), (BUILD, 100)],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_a_full_disk_gives_one_line_and_leaves_no_partial_files(place, command, arguments, room_bytes):
    before = contents(place)
    with room_for(room_bytes):
        code, _, err = command(*arguments)
    assert code == 2, err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert "File too large" in err
    left = {name: content for name, content in contents(place).items() if before.get(name) != content}
    # An interrupted build leaves its finished parts. Data is complete only with a manifest.
    assert all(
        content is None or ".building-" in name or name == "new/.lock" for name, content in left.items()
    )


@pytest.mark.parametrize("script", [[], ["nowhere.py"], ["done"], ["a\nb.py"]])
def test_launching_something_other_than_a_script_is_refused(place, capsys, script):
    with pytest.raises(SystemExit) as ended:
        launch(script)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("[fssdp] error: ")
    assert len(error.splitlines()) == 1


def contents(folder):
    """Contents of all files below a folder by relative path; ``None`` for folders."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def assert_refused(code, out, err):
    assert code == 2, out + err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1, err
    assert "Traceback" not in out + err
