"""No real cluster is used: the stand-ins for Slurm behave as its documentation says."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
import yaml

from megatron_fssdp.records.metrics import read_metrics
from tests.support.python_process import ROOT

from .two_nodes import NODE, RUN, UNFINISHED, TwoNodes

BATCH = ROOT / "scripts" / "slurm" / "train.sbatch"

# One rank for a node. It is asked to end by SIGTERM and adds 20 iterations then; from 40 on it finishes. The
# last checkpoint is complete only after node 1 has ended.
RANK = """
    import pathlib, signal, sys, time

    arguments = sys.argv[1:]
    save = pathlib.Path(arguments[arguments.index("--save") + 1])
    tracker = save / "latest_checkpointed_iteration.txt"
    last = int(arguments[arguments.index("--train-iters") + 1])
    start = int(tracker.read_text()) if "--load" in arguments else 0
    assert "--exit-signal-handler" in arguments

    def end_at(iteration):
        tracker.write_text(str(iteration))
        sys.exit(0)

    signal.signal(signal.SIGTERM, lambda *_: end_at(start + STEP))
    save.mkdir(parents=True, exist_ok=True)
    node = sys.argv[0][-1]
    (save.parent / f"ready-{start}-{node}").touch()
    while start >= 40:
        if node == "1":
            sys.exit(0)
        if (save.parent / "node-1-ended").exists():
            end_at(last)
        time.sleep(0.05)
    time.sleep(1800)
    sys.exit("nobody asked this rank to end")
"""

# Like torchrun its ranks have sessions of their own; unlike torchrun it fails when it is asked to end itself.
TORCHRUN = """
    import os, pathlib, subprocess, sys

    folder = pathlib.Path(__file__).parent
    log = folder / f"torchrun-{os.environ['SLURM_NODEID']}"
    log.write_text(" ".join(sys.argv[1:]))
    rank = folder / f"rank-{os.environ['SLURM_NODEID']}"
    code = subprocess.Popen([sys.executable, rank, *sys.argv[1:]], start_new_session=True).wait()
    sys.exit(code)
"""

# Starts its command for two nodes; once their ranks are up, sends SIGUSR1 to whom the variable says.
SRUN = """
    import contextlib, os, pathlib, psutil, signal, subprocess, sys, time

    command = sys.argv[sys.argv.index("bash"):]
    out = pathlib.Path(command[3])

    def are_ready(start):
        return all((out / f"ready-{start}-{node}").exists() for node in range(2))

    (out / "node-1-ended").unlink(missing_ok=True)
    signaled = {start for start in (0, 20) if are_ready(start)}  # by jobs before
    nodes = [
        subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(node)}, start_new_session=True)
        for node in range(2)
    ]

    while any(node.poll() is None for node in nodes):
        if nodes[1].poll() is not None and out.is_dir():  # bad input leaves no folder
            (out / "node-1-ended").touch()
        for start in (0, 20):
            if start in signaled or not are_ready(start):
                continue
            signaled.add(start)
            for node in nodes:
                if os.environ["SIGNALED"] == "all":
                    whole = psutil.Process(node.pid)
                    for process in (whole, *whole.children(recursive=True)):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.send_signal(signal.SIGUSR1)
                else:
                    os.killpg(node.pid, signal.SIGUSR1)
        time.sleep(0.05)
    sys.exit(max(node.returncode for node in nodes))
"""

# Prints a command in the form of `megatron-fssdp train --dry-run`, which takes much longer.
PRINTED = """
    import sys

    words = sys.argv[1:]
    out = words[words.index("--out") + 1]
    more = ["--load", f"{out}/checkpoints"] if "--resume" in words else []
    more += words[words.index("--moe-strategy") :] if "--moe-strategy" in words else []
    print(
        "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d",
        '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"',
        "-m megatron_fssdp pretrain_gpt --train-iters 60",
        f"--save {out}/checkpoints",
        *more,
    )
"""

SCONTROL = """
    import pathlib, sys

    if sys.argv[1:3] == ["show", "hostnames"]:
        print("node7\\nnode8")
    else:
        with (pathlib.Path(__file__).parent / "scontrol.log").open("a") as log:
            print(*sys.argv[1:], file=log)
"""


class Slurm:
    """A project folder with stand-ins for programs, a run, and the environment variables of a job."""

    def __init__(self, folder):
        self.config = folder / "run.yaml"
        self.config.write_text(yaml.safe_dump(RUN))
        self.project = folder / "project"
        self.bin = self.project / ".venv" / "bin"
        self.bin.mkdir(parents=True)
        (self.project / "scripts").symlink_to(ROOT / "scripts")
        self.spool = folder / "spool"
        self.spool.mkdir()
        shutil.copy(BATCH, self.spool / "slurm_script")
        for name, code in (("torchrun", TORCHRUN), ("srun", SRUN), ("scontrol", SCONTROL)):
            self._program(name, code)
        self.ranks_add(20)
        self._program("megatron-fssdp", PRINTED)
        self.out = folder / "out"

    def use_the_real_cli(self):
        cli = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom megatron_fssdp.cli import app\napp.main()"
        self._program("megatron-fssdp", cli)

    def ranks_add(self, step):
        for node in range(2):
            self._program(f"rank-{node}", RANK.replace("STEP", str(step)))

    def _program(self, name, code):
        path = self.bin / name
        path.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
        path.chmod(0o755)

    def submit(self, *arguments, **env):
        """Run a copy of the batch file on the first node, as Slurm does."""
        variables = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1"}
        variables |= {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_SUBMIT_DIR": str(self.project)}
        variables |= {"SIGNALED": "group"}
        words = ["bash", self.spool / "slurm_script", self.config, self.out, *arguments]
        environment = {**os.environ, **variables, **env}
        return subprocess.run(words, env=environment, capture_output=True, text=True)

    @property
    def requeues(self):
        log = self.bin / "scontrol.log"
        return log.read_text().splitlines() if log.exists() else []

    def torchrun(self, node):
        return (self.bin / f"torchrun-{node}").read_text()


@pytest.fixture
def slurm(tmp_path):
    return Slurm(tmp_path)


def test_a_slurm_job_requeues_until_the_run_is_finished(slurm):
    first = slurm.submit("--moe-strategy", "quota")
    assert first.returncode == 0, first.stderr
    assert "got SIGUSR1" in first.stderr
    assert "requeued; the job will continue from iteration 20" in first.stdout
    assert slurm.requeues == ["requeue 4711"]
    for node in range(2):
        words = slurm.torchrun(node)
        wanted = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=node7:24711 "
        assert words.startswith(wanted)
        assert " quota" in words
        assert "--load" not in words

    second = slurm.submit(SLURM_RESTART_COUNT="1")
    assert second.returncode == 0, second.stderr
    assert "continuing from iteration 20 of 60" in second.stderr
    assert f"--load {slurm.out}/checkpoints" in slurm.torchrun(1)
    assert len(slurm.requeues) == 2

    third = slurm.submit(SLURM_RESTART_COUNT="2")
    assert third.returncode == 0, third.stderr
    assert "requeued" not in third.stdout

    again = slurm.submit()
    assert again.returncode == 0
    assert "the run has finished its 60 iterations" in again.stderr
    assert len(slurm.requeues) == 2


@pytest.mark.slow
def test_data_that_does_not_exist_is_built_before_the_ranks_start(slurm):
    slurm.use_the_real_cli()
    of_data = ("mock_data", "tokenizer_type", "vocab_size")
    training = {key: value for key, value in RUN["training"].items() if key not in of_data}
    data = {"tokenizer": "bytes", "vocab_size": 257}
    slurm.config.write_text(yaml.safe_dump({**RUN, "data": data, "training": training}))
    done = slurm.submit()
    assert done.returncode == 0, done.stderr
    assert "building the data" in done.stderr
    assert (slurm.out.parent / "data-bytes" / "manifest.json").is_file()
    assert slurm.torchrun(0).startswith("--nnodes=2")


def test_a_signal_to_all_processes_ends_all_ranks(slurm):
    done = slurm.submit(SIGNALED="all")
    assert done.returncode == 0, done.stderr
    assert slurm.requeues == ["requeue 4711"]


def test_a_job_without_progress_is_not_requeued_forever(slurm):
    slurm.ranks_add(0)
    done = slurm.submit()
    assert done.returncode == 2
    assert "no checkpoint was added" in done.stderr
    assert slurm.requeues == []


def test_bad_input_is_reported_once_by_the_first_node(slurm):
    slurm.use_the_real_cli()
    done = slurm.submit("--moe-strategy", "fsdp")
    assert done.returncode == 2
    assert done.stderr.count("unknown MoE strategy 'fsdp'") == 1
    assert slurm.requeues == []


def test_missing_requirements_of_a_node_are_named():
    environment = os.environ | {"NUM_NODES": "2", "RANKS_PER_NODE": "1", "MASTER_ADDR": ""}
    words = ["bash", NODE, "run.yaml", "out"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "MASTER_ADDR is not set" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGUSR1, signal.SIGTERM])
def test_a_run_on_two_emulated_nodes_stops_early_and_resumes(tmp_path, ending):
    """Megatron's training loop runs; one node gets the signal, and its rank tells the other node's rank."""
    with TwoNodes(tmp_path, train_iters=300) as run:
        run.start()
        run.wait_until(lambda: run.num_iterations() >= 3)
        run.processes[1].send_signal(ending)
        assert run.exit_codes() == [UNFINISHED, UNFINISHED], run.said()
        assert 3 <= (reached := run.saved_iteration()) < 300
        run.start()
        assert run.exit_codes() == [0, 0], run.said()
    assert f"continuing from iteration {reached} of 300" in (tmp_path / "log-0").read_text()
    assert [record.iteration for record in read_metrics(run.out)] == list(range(1, 301))
