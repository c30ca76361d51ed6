import os
import signal
import subprocess
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.testing import RankError, run_megatron_ranks, run_ranks

from ..support.python_process import is_running
from .test_example import expert_parallel_size


class Greeting(NamedTuple):  # a type of a test file is passed to ranks and returned by them
    text: str
    rank: int = -1


def greet(rank, world_size, greeting):
    total = torch.tensor(rank)
    dist.all_reduce(total)
    print(f"line of {rank}")
    os.write(2, b"straight to the descriptor\n")
    return Greeting(f"{greeting.text} {int(total)}", rank)


def look_around(rank, world_size):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "GREETING")
    return [os.environ.get(name) for name in names], os.getcwd(), torch.get_num_threads(), os.getpid()


def raise_on(rank, world_size, culprit):
    print(f"rank {rank} was here")
    if rank == culprit:
        raise KeyError("lost my keys")
    dist.barrier()


def hang_on(rank, world_size, culprits):
    while rank in culprits:
        time.sleep(0.05)


def die_on(rank, world_size, culprit, how):
    if rank == culprit and how == "exit":
        os._exit(0)
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def die_or_raise_later(rank, world_size, later_s):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(later_s)
    raise KeyError("lost my keys")


def start_and_die(rank, world_size, folder):
    child = subprocess.Popen(["sleep", "600"])
    (folder / str(rank)).write_text(str(child.pid))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def return_a_lambda(rank, world_size):
    return lambda: rank


@pytest.mark.parametrize("world_size", [1, 4])
def test_results_come_in_rank_order_and_output_is_printed_by_the_caller(capfd, world_size):
    results = run_ranks(greet, world_size, Greeting("hello"))
    total = sum(range(world_size))
    assert results == [Greeting(f"hello {total}", rank) for rank in range(world_size)]
    shown = capfd.readouterr().out
    assert all(f"line of {rank}" in shown for rank in range(world_size))
    assert "straight to the descriptor" in shown


def test_ranks_get_the_environment_and_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(look_around, 2, env={"GREETING": "hello"})
    for rank, (variables, cwd, num_threads, _) in enumerate(results):
        assert variables == [str(rank), "2", str(rank), "1", "hello"]
        assert os.path.samefile(cwd, tmp_path)
        assert num_threads == 1
    assert len({pid for *_, pid in results}) == 2


def test_an_exception_of_a_rank_is_raised_soon_with_its_traceback_and_output():
    with pytest.raises(RankError) as caught:
        run_ranks(raise_on, 4, 2)
    message = str(caught.value)
    parts = ("rank 2 raised", 'raise KeyError("lost my keys")', "test_run_ranks.py", "rank 2 was here")
    assert all(part in message for part in parts)
    assert 2 in caught.value.ranks


def test_a_timeout_names_the_hanging_ranks_and_their_stacks():
    for timeout_s in (2, 20, 200):  # in which the others return, also on a busy machine
        with pytest.raises(RankError) as caught:
            run_ranks(hang_on, 4, [1, 3], timeout_s=timeout_s)
        if caught.value.ranks == (1, 3):
            break
    assert f"time-out after {timeout_s} s; still running: rank 1, 3\n" in str(caught.value)
    assert "in hang_on" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "wanted"), [("exit", "exited with code 0"), ("kill", "was ended by signal 9")]
)
def test_a_rank_that_dies_without_an_exception_is_named(how, wanted):
    with pytest.raises(RankError, match=f"rank 1 {wanted}"):
        run_ranks(die_on, 2, 1, how)
    assert len(run_ranks(look_around, 2)) == 2


def test_a_grace_period_lets_the_other_ranks_end_by_themselves():
    for grace_s, later_s, ranks in ((0.1, 600, (1,)), (600, 0.5, (1, 0))):
        with pytest.raises(RankError, match="rank 1 was ended by signal 9") as caught:
            run_ranks(die_or_raise_later, 2, later_s, grace_s=grace_s)
        assert caught.value.ranks == ranks


def test_what_other_processes_cannot_find_is_refused():
    with pytest.raises(ValueError, match="move it to the top of its module"):
        run_ranks(lambda rank, world_size: rank, 1)
    with pytest.raises(ValueError, match="world_size"):
        run_ranks(look_around, 0)
    with pytest.raises(RankError, match="return_a_lambda"):
        run_ranks(return_a_lambda, 1)


def test_preloaded_functions_run_in_order_and_report_failures(tmp_path, monkeypatch):
    code = "import os\ndef install():\n    os.environ['GREETING'] = 'installed'\n"
    (tmp_path / "preloaded_module.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    results = run_ranks(look_around, 1, preload=("preloaded_module:install", "torch"))
    assert results[0][0][-1] == "installed"
    with pytest.raises(RuntimeError, match="no_such_module"):
        run_ranks(look_around, 1, preload=("no_such_module",))


def test_a_world_size_that_does_not_match_the_layout_is_refused():
    with pytest.raises(RankError, match="change the number of ranks or the sizes"):
        run_megatron_ranks(expert_parallel_size, 2, ep=4)


def test_child_processes_of_a_rank_end_with_it(tmp_path):
    with pytest.raises(RankError):
        run_ranks(start_and_die, 2, tmp_path)
    for rank in range(2):
        while is_running(int((tmp_path / str(rank)).read_text())):  # or pytest's time limit ends the test
            time.sleep(0.01)
