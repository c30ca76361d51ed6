"""Complete trainings through Megatron's own command line, in forked ranks."""

import atexit
import contextlib
import io
import logging
import os
import queue
import re
import runpy
import shlex
import sys
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import get_args, training

from megatron_fssdp.megatron_adapter.entry.launcher import launch
from megatron_fssdp.megatron_adapter.wrapping import wrap as wrap
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy
from megatron_fssdp.testing import run_ranks
from tests.support.python_process import ROOT
from tests.support.tables import cells
from tests.support.training_preload import TRAINING_PRELOAD

from .expert_gradients import Norms
from .expert_gradients import assert_close as assert_gradients_close
from .expert_gradients import record as record_expert_gradients

SCRIPTS = ROOT / "scripts"
SCRIPT = SCRIPTS / "pretrain_gpt.py"

# Small sizes, the CPU's part of a command line, and no logs and evaluations.
SMALL = """
    --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant
    --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 1 --seed 1234
    --num-workers 0 --split 100,0,0 --log-interval 1000 --eval-iters 0 --eval-interval 1000000
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --disable-jit-fuser
"""
TINY_GPT_MOE = f"""
    {SMALL} --num-layers 2 --global-batch-size 8 --train-iters 20 --weight-decay 0.01 --clip-grad 1.0
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall --attention-dropout 0 --hidden-dropout 0
"""


# Short names of Megatron's arguments. Trainings and tables get them in braces.
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
BATCH16, BATCH32 = "--global-batch-size 16", "--global-batch-size 32"
DISTRIBUTED = "--use-distributed-optimizer"
RESHARDABLE = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
OVERLAPS = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
BUCKETS = f"{OVERLAPS} --ddp-num-buckets 4"
NO_BIAS = "--disable-bias-linear"
GATED = f"--swiglu {NO_BIAS}"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
WHOLE_EXPERTS = "--expert-tensor-parallel-size 1"
PARTS = f"--tensor-model-parallel-size 2 {NO_BIAS}"
WHOLE = f"--tensor-model-parallel-size 2 {WHOLE_EXPERTS}"
PP2 = "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RECOMPUTE_MOE = "--recompute-granularity selective --recompute-modules moe"
TOP1 = "--moe-router-topk 1 --moe-router-pre-softmax"
AUX_LOSS = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
Z_LOSS = f"{AUX_LOSS} --moe-z-loss-coeff 1e-3"
EXPERT_BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
SHARED = "--moe-shared-expert-intermediate-size 32"
SHARED_OVERLAP = f"{SHARED} --moe-shared-expert-overlap {NO_BIAS}"
DROPPING = "--moe-expert-capacity-factor 1.0"
MTP = "--mtp-num-layers 1 --position-embedding-type rope"
EVALUATES = "--split 90,10,0 --eval-iters 1 --eval-interval 2"
TORCH_DIST = "--ckpt-format torch_dist"
SHORT_AVERAGES = "--adam-beta1 0.8 --adam-beta2 0.9"
NAMES = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, str)}


def rows(table, **names):
    """Read a table by the first cells of its rows; short names of arguments, and more names, are replaced."""
    return {name: others for name, *others in cells(table, **{**NAMES, **names})}


HALF = (2e-3, 2e-2)  # bounds of losses and norms in half precision


@dataclass(frozen=True)
class Model:
    """What is trained: a training script, and Megatron's arguments for a tiny model."""

    script: Path
    arguments: str


GPT = Model(SCRIPT, TINY_GPT_MOE)
# Masked words need a vocabulary of words, and sentences need longer sequences.
BERT = Model(
    SCRIPTS / "pretrain_bert.py",
    f"{TINY_GPT_MOE} --vocab-size 600 --seq-length 32 --max-position-embeddings 32",
)


@dataclass(frozen=True)
class TrainingRun:
    """What one rank saw of a training."""

    losses: tuple[float, ...]  # the first loss of each iteration; empty outside the last pipeline stage
    grad_norms: tuple[float, ...]  # of each iteration
    exit_code: int  # 0, or what the launcher exited with
    errors: str  # standard error
    messages: tuple[str, ...] = ()  # of the plugin's loggers at level INFO and above
    other_losses: tuple[float, ...] = ()  # all further losses of all iterations
    notes: tuple[Any, ...] = ()  # what functions on the rank have given to :func:`note`
    expert_gradients: tuple[Norms, ...] = ()  # at each step of the optimizer, of the rank's own experts

    @property
    def all_losses(self):
        return self.losses + self.other_losses


def train_on_all_ranks(
    world_size, arguments, data, *, strategy=None, model=GPT, before=None, launcher=True, env=None, **limits
):
    """Train a tiny model with more arguments, of which later ones win; short names in braces are replaced.

    A ``strategy`` has its settings behind it, as in ``fssdp slots=2``. ``before`` is a function at the top of
    a module that each rank calls before the launch. Without the ``launcher``, the bare script runs. Limits of
    time are those of :func:`run_ranks`.
    """
    arguments = f"{arguments} {flags(strategy)}" if strategy else arguments
    arguments, variables = without_variables(arguments)
    argv = command_line(model, arguments, data)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "LOCAL_WORLD_SIZE": str(world_size)}
    given = {"env": {**environment, **variables, **(env or {})}, "preload": TRAINING_PRELOAD}
    return run_ranks(train_on_rank, world_size, argv, before, launcher, **limits, **given)


def train(world_size, arguments, data, **options):
    """As :func:`train_on_all_ranks`; it must succeed. Returns what the last rank with losses saw.

    Messages, notes and experts are those of all ranks.
    """
    runs = train_on_all_ranks(world_size, arguments, data, **options)
    failed = next((run for run in runs if run.exit_code), None)
    assert failed is None, f"{arguments}: {failed.errors[-3000:]}"
    last = next((run for run in reversed(runs) if run.losses), runs[-1])
    messages, notes = (tuple(chain(*map(attrgetter(name), runs))) for name in ("messages", "notes"))
    of_iterations = zip(*(run.expert_gradients for run in runs), strict=True)
    norms = tuple({key: norm for of_rank in step for key, norm in of_rank.items()} for step in of_iterations)
    return replace(last, messages=messages, notes=notes, expert_gradients=norms)


def slow(names):
    """Parameters of a test that are not part of the default run."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


_notes = []


def note(value):
    """On a rank, keep something for :attr:`TrainingRun.notes`."""
    _notes.append(value)


def messages_of(logger):
    """A list that gets the messages of a logger on this rank at level INFO and above."""
    messages, handler = list[str](), logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    return messages


def add_to_logits(hot, bias):
    """On a rank, make experts hot: those that a function of the gate's logits names."""

    def skewed(gating, router, hidden):
        logits = gating(router, hidden)
        extra = logits.new_zeros(logits.shape)
        extra[..., hot(logits)] = bias
        return logits + extra

    wrap(TopKRouter, "gating", skewed)


def before_iterations(do):
    """On a rank, call a function with an iteration's number, the model and the optimizer before it.

    The plugin wraps Megatron's ``train_step`` in turn, so that re-sharding is over.
    """

    def step(original, forward, data, model, optimizer, *args, **kwargs):
        do(get_args().curr_iteration + 1, model, optimizer)
        return original(forward, data, model, optimizer, *args, **kwargs)

    wrap(training, "train_step", step)


def without_variables(arguments):
    """Take environment variables out of arguments, as a shell does in front of a command."""
    variables = dict[str, str](re.findall(r"\b([A-Z_]+)=(\S+)", arguments))
    return re.sub(r"\b[A-Z_]+=\S+", "", arguments), variables


def flags(strategy, **more):
    """Return the options for a strategy and its settings, such as ``fssdp slots=2 FSSDP_CHECK_PLANS=1``."""
    name, *settings = strategy.split()
    settings += [f"{key}={value}" for key, value in more.items()]
    words = (setting if setting[0].isupper() else f"--moe-strategy-set {setting}" for setting in settings)
    return " ".join([f"--moe-strategy {name}", *words])


def share_exactly():
    """Let ``fssdp`` share tokens out by exact counts, which price would hardly ever choose on CPU ranks."""

    def exact(before_gate, *given):
        return replace(before_gate(*given), dispatch_policy="exact")

    wrap(FssdpStrategy, "before_gate", exact)


def relative_difference(got, wanted):
    assert len(got) == len(wanted) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))


def assert_close(run, to, losses=1e-05, norms=0.0001, *, since=0):
    """Check the relative differences of a run from another one, whose first iterations can be left out.

    In fp32, the gradient of every expert has the bound of losses. In half precision, more and more tokens are
    routed differently, so those of the first iterations are compared, coarsely.
    """
    bound, last = (losses, None) if losses < HALF[0] else (0.1, 3)
    assert_gradients_close(run.expert_gradients[:last], to.expert_gradients[since:][:last], bound)
    wanted = to.losses[since:] if since else to.all_losses
    assert relative_difference(run.losses if since else run.all_losses, wanted) <= losses
    if any(to.grad_norms):  # Megatron computes the norm only for clipping.
        assert relative_difference(run.grad_norms, to.grad_norms[since:]) <= norms


def assert_equal(run, to, *, since=0):
    """Check that a run has the bits of another one, whose first iterations can be left out."""
    assert len(run.losses) > 0
    assert (run.losses, run.grad_norms) == (to.losses[since:], to.grad_norms[since:])
    assert run.expert_gradients == to.expert_gradients[since:]
    assert since or run.other_losses == to.other_losses


def command_line(model, arguments, data):
    return [
        str(model.script),
        *shlex.split(model.arguments),
        *("--data-path", str(data), "--data-cache-path", str(data.parent / "cache")),
        *("--tokenizer-model", str(data.parent)),
        *shlex.split(arguments.format_map(NAMES)),
    ]


def train_on_rank(rank, world_size, argv, before, launcher):
    """Run a training's script on this rank, see :func:`train_on_all_ranks`."""
    losses, other_losses, grad_norms = list[float](), list[float](), list[float]()

    def recording_step(step, *args, **kwargs):
        result = step(*args, **kwargs)
        if result[0]:
            loss, *others = map(float, result[0].values())
            losses.append(loss)
            other_losses.extend(others)
        if result[5] is not None:  # an iteration that Megatron rejects has no loss
            grad_norms.append(float(result[5]))
        return result

    wrap(training, "train_step", recording_step)
    norms = []
    record_expert_gradients(norms)
    # A synchronous save returns its results by this queue. Megatron's own queue takes a process, and seconds.
    filesystem_async._results_queue = queue.Queue()
    messages = messages_of("megatron_fssdp")
    if os.environ.get("SHARES") == "exact":
        share_exactly()
    if before is not None:
        before()
    errors = io.StringIO()
    exit_code = 0
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            if launcher:
                launch(argv)
            else:
                sys.argv = argv
                runpy.run_path(argv[0], run_name="__main__")
    except Exception as error:
        error.add_note(f"standard error:\n{errors.getvalue()[-4000:]}")
        raise
    except SystemExit as exit_request:
        exit_code = exit_request.code if isinstance(exit_request.code, int) else int(bool(exit_request.code))
    atexit._run_exitfuncs()  # a forked rank exits without running them, unlike a real process
    seen = tuple(messages), tuple(other_losses), tuple(_notes), tuple(norms)
    return TrainingRun(tuple(losses), tuple(grad_norms), exit_code, errors.getvalue(), *seen)
