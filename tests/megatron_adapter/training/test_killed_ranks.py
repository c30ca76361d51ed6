"""A rank is killed during a training: the other rank ends with a clear error, and the run resumes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from megatron_fssdp.testing.ranks import RankError

from ..checkpoints.test_killed_save import die_in_second_save
from ..checkpoints.test_uneven_checkpoint import differing_keys, stored_tensors
from ..training_run import GPT, command_line, flags, relative_difference, train, wrap

FSSDP = flags("fssdp slots=2 overlap_degree=4 reshard_interval=2")
TRAINING = f"{{EP2}} --train-iters 4 --save-interval 2 --no-save-rng --no-load-rng {FSSDP}"
KILLED_IN = 3  # the iteration after the first save and the first re-shard
NOTICED_S = 60  # a lost connection is noticed at once; the groups' own time-out is 10 minutes


@pytest.fixture(scope="module")
def whole(text_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[float, ...], Path]:
    """Losses and checkpoints of a run without a killed rank."""
    folder = tmp_path_factory.mktemp("whole")
    return train(2, f"{TRAINING} --save {folder}", text_data).losses, folder


def die_after(owner: str | type, name: str) -> None:
    """Kill rank 1 after the first call of a class's method in an iteration."""
    from megatron.training.global_vars import get_args

    def and_die(method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if os.environ["RANK"] == "1" and get_args().curr_iteration + 1 == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    wrap(resolve_name(owner) if isinstance(owner, str) else owner, name, and_die)


CARGO = "megatron_fssdp.collectives.sparse.transfer_cargo"
# When it has sent a piece of an expert, a piece of a gradient, and between the gate and the dispatch.
die_in_all_gather = partial(die_after, f"{CARGO}:GatherCargo", "outgoing")
die_in_reduce_scatter = partial(die_after, f"{CARGO}:ReductionCargo", "outgoing")
die_in_forward = partial(
    die_after, "megatron_fssdp.megatron_adapter.layer.moe_layer:StrategyMoELayer", "route"
)


def die_in_reshard() -> None:
    """Kill rank 1 when the first piece of the moving experts has been exchanged and written."""
    from megatron_fssdp.megatron_adapter.experts import resharding

    def and_die(exchange: Any, group: Any, moves: Any, quantities: Sequence[Any], **options: Any) -> None:
        for kind in {type(quantity) for quantity in quantities}:
            die_after(kind, "write")
        exchange(group, moves, quantities, **options)

    wrap(resharding, "exchange_slots", and_die)


IN_TURN = "--moe-strategy-set overlap=false"
CASES: dict[str, tuple[Callable[[], None], str, str]] = {
    # The other rank can first fail in the exchange of the layer's token counts.
    "spAG": (die_in_all_gather, "", r"3, in .*MoE layer "),
    "spAG alone": (die_in_all_gather, IN_TURN, r"3, in .*SparseAllGather of layer "),
    "a re-shard": (die_in_reshard, "", r"3, in .*a re-shard"),
    "forward": (die_in_forward, "", r"3, in .*the forward pass of MoE layer 1"),
    "spRS": (die_in_reduce_scatter, "", r"3, in .*SparseReduceScatter of layer "),
    "a save": (die_in_second_save, "", r"4, in saving .*/iter_0000004: "),
}


@pytest.mark.parametrize(
    "case", ["spAG", *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])]
)
def test_after_a_killed_rank_the_other_ends_and_the_run_resumes(
    case: str, whole: tuple[tuple[float, ...], Path], text_data: Path, tmp_path: Path
) -> None:
    (losses, folder), (die, options, place) = whole, CASES[case]
    with pytest.raises(RankError) as caught:
        train(2, f"{TRAINING} {options} --save {tmp_path}", text_data, before=die, grace_s=NOTICED_S)
    message = str(caught.value)
    assert caught.value.ranks == (1, 0), message  # both ranks ended by themselves
    assert "rank 1 was ended by signal 9" in message
    (line,) = re.findall(r"\[fssdp\] rank 0 stopped .*", message)
    print("\n" + line)
    assert re.match(rf"\[fssdp\] rank 0 stopped in iteration {place}", line)
    assert f"The last complete checkpoint is of iteration 2: restart with --load {tmp_path}" in line

    assert differing_keys(stored_tensors(folder, 2), stored_tensors(tmp_path, 2)) == []
    resumed = train(2, f"{TRAINING} --load {tmp_path}", text_data)
    assert relative_difference(resumed.losses, losses[2:]) <= 1e-6


@pytest.mark.slow
def test_a_waiting_process_ends_by_itself_when_its_peer_is_killed(text_data: Path, tmp_path: Path) -> None:
    """There is neither a torchrun agent that ends the other ranks nor the test server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); import torch; "
        "torch.compiler.set_stance('force_eager'); "
        "from tests.megatron_adapter.training.test_killed_ranks import die_in_reduce_scatter; "
        "from megatron_fssdp.megatron_adapter.entry.launcher import launch; "
        "die_in_reduce_scatter(); launch(sys.argv[1:])"
    )
    arguments = command_line(GPT, f"{TRAINING} --save {tmp_path}", text_data)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={
                **os.environ,
                **{"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            },
            stdout=(tmp_path / f"rank{rank}.txt").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        assert processes[1].wait(200) == -signal.SIGKILL
        died_s = time.monotonic()
        assert processes[0].wait(NOTICED_S) == 1
        print(f"\nthe other rank ended after {time.monotonic() - died_s:.1f} s")
    finally:
        for process in processes:
            process.kill()
    output = (tmp_path / "rank0.txt").read_text()
    assert f"[fssdp] rank 0 stopped in iteration {KILLED_IN}, in SparseReduceScatter of layer " in output
