import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.testing import RankError, run_ranks


@dataclass
class Greeting:
    """A type of a test file that is passed to ranks and returned by them."""

    text: str
    rank: int = -1


def add_up(rank, world_size, start):
    total = torch.tensor([float(rank + start)])
    dist.all_reduce(total)
    return rank, world_size, total


def greet(rank, world_size, greeting):
    return Greeting(greeting.text, rank)


def do_nothing(rank, world_size):
    return os.getpid()


def raise_on(rank, world_size, culprit):
    print(f"rank {rank} was here")
    if rank == culprit:
        raise KeyError("lost my keys")
    dist.barrier()


def hang_on(rank, world_size, culprits):
    while rank in culprits:
        time.sleep(0.05)


def die_on(rank, world_size, culprit, how):
    if rank == culprit:
        if how == "exit":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def die_or_raise_later(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    raise KeyError("lost my keys")


def start_and_die(rank, world_size, folder):
    child = subprocess.Popen(["sleep", "600"])
    (folder / str(rank)).write_text(str(child.pid))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def return_a_lambda(rank, world_size):
    return lambda: rank


def look_around(rank, world_size):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "GREETING")
    return {name: os.environ.get(name) for name in names}, os.getcwd(), torch.get_num_threads()


def print_a_line(rank, world_size):
    print(f"line of {rank}")
    os.write(2, b"straight to the descriptor\n")


def test_results_come_in_rank_order_and_collectives_work():
    for world_size in (1, 2, 4):
        results = run_ranks(add_up, world_size, 10)
        wanted = float(sum(rank + 10 for rank in range(world_size)))
        assert [r[:2] for r in results] == [(rank, world_size) for rank in range(world_size)]
        assert all(r[2].item() == wanted for r in results)


def test_types_of_a_test_file_can_be_arguments_and_results():
    results = run_ranks(greet, 2, Greeting("hello"))
    assert results == [Greeting("hello", 0), Greeting("hello", 1)]


def test_an_exception_of_a_rank_is_raised_soon_with_its_traceback_and_output():
    start_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(raise_on, 4, 2)
    assert time.monotonic() - start_s < 20
    message = str(caught.value)
    assert "rank 2 raised" in message
    assert 'raise KeyError("lost my keys")' in message
    assert "test_run_ranks.py" in message
    assert "rank 2 was here" in message
    assert 2 in caught.value.ranks


def test_a_timeout_names_the_hanging_ranks_and_their_stacks():
    with pytest.raises(RankError, match="still running: rank 1, 3\n") as caught:
        run_ranks(hang_on, 4, [1, 3], timeout_s=6)
    assert caught.value.ranks == (1, 3)
    assert "in hang_on" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "wanted"), [("exit", "rank 1 exited with code 0"), ("kill", "rank 1 was ended by signal 9")]
)
def test_a_rank_that_dies_without_an_exception_is_named(how, wanted):
    with pytest.raises(RankError, match=wanted):
        run_ranks(die_on, 2, 1, how)
    assert len(run_ranks(do_nothing, 2)) == 2


def test_a_grace_period_lets_the_other_ranks_end_by_themselves():
    with pytest.raises(RankError, match="rank 1 was ended by signal 9") as caught:
        run_ranks(die_or_raise_later, 2)
    assert caught.value.ranks == (1,)
    with pytest.raises(RankError, match="rank 0 raised") as caught:
        run_ranks(die_or_raise_later, 2, grace_s=30)
    assert caught.value.ranks == (1, 0)


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(RankError, match="return_a_lambda"):
        run_ranks(return_a_lambda, 1)


def test_functions_that_ranks_cannot_import_are_refused():
    def closure(rank, world_size):
        return rank

    with pytest.raises(ValueError, match="move it to the top of its module"):
        run_ranks(closure, 1)
    with pytest.raises(ValueError, match="lambda"):
        run_ranks(lambda rank, world_size: rank, 1)
    with pytest.raises(ValueError, match="world_size"):
        run_ranks(do_nothing, 0)


def test_ranks_get_the_environment_and_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(look_around, 2, env={"GREETING": "hello"})
    for rank, (environment, cwd, num_threads) in enumerate(results):
        assert environment == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            "GREETING": "hello",
        }
        assert os.path.samefile(cwd, tmp_path)
        assert num_threads == 1


def test_output_of_the_ranks_is_printed_by_the_caller(capfd):
    run_ranks(print_a_line, 2)
    shown = capfd.readouterr().out
    assert "line of 0" in shown
    assert "line of 1" in shown
    assert "straight to the descriptor" in shown


def test_preloaded_functions_run_in_order_and_report_failures(tmp_path, monkeypatch):
    (tmp_path / "preloaded_module.py").write_text(
        "import os\ndef install():\n    os.environ['GREETING'] = 'installed'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    results = run_ranks(look_around, 1, preload=("preloaded_module:install", "torch"))
    assert results[0][0]["GREETING"] == "installed"
    with pytest.raises(RuntimeError, match="no_such_module"):
        run_ranks(do_nothing, 1, preload=("no_such_module",))
    sys.modules.pop("preloaded_module", None)


def test_child_processes_of_a_rank_end_with_it(tmp_path):
    with pytest.raises(RankError):
        run_ranks(start_and_die, 2, tmp_path)
    for rank in range(2):
        pid = int((tmp_path / str(rank)).read_text())
        deadline_s = time.monotonic() + 5
        while _runs(pid) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not _runs(pid)


def _runs(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
