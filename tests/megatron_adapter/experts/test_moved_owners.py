"""Trainings in which owners move anywhere, whatever the loads are, have the losses of stock Megatron.

Without replicas, losses are equal bit for bit: every expert computes the same rows wherever it is, with all
of its optimizer state. A rank can own no expert of a layer, slots can hold experts of other layers and model
chunks, and replicas are copies of Parameters that DDP may still be gathering.
"""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megatron_fssdp.collectives.sparse import slot_exchange
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.runtime.layers.layer_planner import LayerPlanner
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy

from .. import training_run
from ..adapters import adapt
from ..training_run import assert_close, relative_difference, rows, slow, train, wrap

SILENT = 1e-6  # relative difference to stock Megatron's losses that counts as equal

# name | ranks | Megatron's arguments | strategy | hooks
ROWS = rows(
    """
    bf16, distributed in parts, overlaps | 4 | {EP2} --bf16 {OVERLAPS} | {OWNERS} | anywhere
    layers on one device, replicas | 2 | {EP2} {NO_BIAS} --lr 5e-3 | {REPLICAS} | halves
    some experts frozen | 2 | {EP2} | {REPLICAS} reshard_interval=0 | freeze_some
    adapters on frozen experts | 2 | {EP2} --lr 5e-3 | {REPLICAS} | halves freeze_under_adapters
    frozen in the middle | 2 | {EP2} | {OWNERS} | anywhere freeze_for_two_iterations
    fp32 | 2 | {EP2} | {OWNERS} | anywhere
    fp32, distributed, interleaved pipeline, overlaps | 4 | {EP2} {INTERLEAVED} {OVERLAPS} | {OWNERS}
        | anywhere
    fp32, distributed in parts, overlaps | 4 | {EP2} {OVERLAPS} | {OWNERS} | anywhere
    fp16 in copies | 4 | {EP2} --fp16 --initial-loss-scale 1024 | {OWNERS} | anywhere
    sgd | 2 | {EP2} --optimizer sgd | {OWNERS} | anywhere
    lion | 2 | {EP2} --optimizer lion | {OWNERS} | anywhere
    several instances, each with parts | 8 | {EP2} --bf16 {INSTANCES} {BATCH16} | {OWNERS} | anywhere
    several instances, each on one rank | 4 | {EP2} --bf16 {INSTANCES} --overlap-grad-reduce | {OWNERS}
        | anywhere
    muon | 4 | {EP2} --bf16 --optimizer muon --muon-momentum 0.9 {NO_BIAS} | {OWNERS} | anywhere
    layer-wise muon | 4 | {EP2} --bf16 --optimizer muon --muon-momentum 0.9 {NO_BIAS} {DISTRIBUTED} | {OWNERS}
        | anywhere
    all experts frozen | 2 | {EP2} | {OWNERS} | anywhere freeze_all
    all experts frozen, replicas | 2 | {EP2} | {REPLICAS} | halves freeze_all
    some experts frozen, prophet | 2 | {EP2} | prophet | freeze_some
    buckets of layers, replicas | 4 | {EP2} {NO_BIAS} --lr 5e-3 {BY_LAYER} | {REPLICAS} | halves
    buckets of layers, long-lived replicas | 4 | {EP2} {BY_LAYER} --num-layers 3 --lr 1e-2 --min-lr 1e-3
        | {REPLICAS} slots=4 reshard_interval=0 |
    buckets of layers, long-lived replicas, split transfers | 4 | {EP2} {BY_LAYER} --num-layers 3 --lr 1e-2
        --min-lr 1e-3 | {REPLICAS} slots=4 reshard_interval=0 | split_transfers
    interleaved pipeline, replicas | 4 | {EP2} {NO_BIAS} {INTERLEAVED} --overlap-grad-reduce {BATCH16}
        --lr 5e-3 | {REPLICAS} | halves
    """,
    OWNERS="fssdp slots=0 overlap_degree=0 reshard_interval=1",
    REPLICAS="fssdp slots=2 overlap_degree=4 reshard_interval=1",
    INSTANCES="--use-distributed-optimizer --num-distributed-optimizer-instances 2",
    # Parameters are gathered by bucket, and every layer's experts have their own bucket.
    BY_LAYER="{OVERLAPS} --ddp-bucket-size 8000",
)
DEFAULT = list(ROWS)[:4]
NEVER_MOVE = ("", "freeze_some", "split_transfers")  # hooks without a map of owners
PACKAGES = {"several": "einops", **dict.fromkeys(("lion", "muon", "layer-wise"), "emerging_optimizers")}


def run(name, data, *, stock=False):
    """Train a row; stock Megatron gets only those of its hooks that change the model."""
    num_ranks, arguments, strategy, hooks = ROWS[name]
    chosen = hooks.split()
    if stock:
        chosen, strategy = [hook for hook in chosen if hook.startswith("freeze")], "none"
    # Clipping would divide by a norm, whose parts are summed in another order when experts have moved.
    arguments = f"{arguments} --train-iters {3 if name in DEFAULT else 6} --clip-grad 0"
    return train(int(num_ranks), arguments, data, strategy=strategy, before=partial(call, chosen))


@pytest.mark.parametrize("name", [*DEFAULT, *slow(list(ROWS)[len(DEFAULT) :])])
def test_losses_equal_stock_megatron(name, text_data):
    package = PACKAGES.get(name.split()[0])
    if package is not None and find_spec(package) is None:
        pytest.skip(f"Megatron needs {package} for this optimizer")
    stock, ours = run(name, text_data, stock=True), run(name, text_data)
    if "anywhere" in ROWS[name]:
        assert (ours.losses, ours.expert_gradients) == (stock.losses, stock.expert_gradients)
    else:
        assert_close(ours, stock)
    bound = 10 * SILENT if "long-lived" in name else SILENT
    assert relative_difference(ours.all_losses, stock.all_losses) <= bound
    assert any("re-sharded" in message for message in ours.messages) == (ROWS[name][3] not in NEVER_MOVE)


@pytest.mark.parametrize(
    ("strategy", "change", "num_done", "words"),
    [
        ("fssdp", "freeze_some", 0, "frozen reshard_interval=0"),
        # Found in the step that makes the states.
        ("fssdp", "keep_row_means", 1, "row_means"),
        ("flexmoe", "keep_row_means", 1, "row_means"),
    ],
)
def test_experts_that_cannot_move_are_refused_in_one_line(strategy, change, num_done, words, text_data):
    options = {"strategy": strategy, "before": partial(call, [change])}
    for rank in training_run.train_on_all_ranks(2, "{EP2} --train-iters 6", text_data, **options):
        assert (rank.exit_code, len(rank.losses)) == (2, num_done)
        (line,) = [line for line in rank.errors.splitlines() if "[fssdp] error" in line]
        assert all(word in line for word in words.split())


def test_slots_that_are_not_interchangeable_are_refused_on_all_ranks(text_data):
    arguments, strategy = "{EP2} --train-iters 3 {OVERLAPS}", "fssdp slots=0 reshard_interval=100"
    undisturbed = train(4, arguments, text_data, strategy=strategy)
    tried = train(4, arguments, text_data, strategy=strategy, before=try_what_is_refused)
    assert tried.losses == undisturbed.losses, "a refused re-shard moved something"


# ---------------------------------------------------------------- on the ranks


def call(names):
    """Call functions of this file, which are named because tables and other processes get names."""
    for name in names:
        globals()[name]()


def force_owners(devices):
    """Re-shard to a map that does not follow loads, and in pieces that several ranks have parts of."""

    def reshard(self, contexts, load_LE, owners):
        even = np.arange(owners.device_LE.size) * owners.num_devices // owners.device_LE.size
        return owners.with_owners(devices(even).reshape(owners.device_LE.shape))

    FssdpStrategy.reshard = reshard
    slot_exchange.BUFFER_BYTES = 20_000


def anywhere():
    """A device can own no or all experts of a layer, and its slots hold those of any layer."""
    force_owners(np.random.default_rng(7).permutation)


def halves():
    """Each device owns all experts of some layers, also of other model chunks."""
    force_owners(lambda even: even)


def freeze_all():
    before_ddp(lambda experts: experts.requires_grad_(False))


def freeze_some():
    """Freeze the first expert of every rank. A device can then have replicas of trained experts only."""
    before_ddp(lambda experts: experts.local_experts[0].requires_grad_(False))


def freeze_for_two_iterations():
    """Megatron's optimizers step what was frozen after they were built, too."""

    def freeze(iteration, model, _):
        for name, parameter in model[0].named_parameters():
            if "local_experts" in name:
                parameter.requires_grad_(iteration not in (3, 4))

    training_run.before_iterations(freeze)


def freeze_under_adapters():
    before_ddp(partial(adapt, host="mcore_bridge"))


def before_ddp(change):
    """Change experts as a user does between building and wrapping a model."""

    def built(init, self, *args, **kwargs):
        init(self, *args, **kwargs)
        for experts in [part for part in self.modules() if hasattr(part, "local_experts")]:
            change(experts)

    wrap(GPTModel, "__init__", built)


def keep_row_means():
    """Let torch's optimizer make a state of another shape in its step, as SOAP does."""

    def keeping(step, self, *args, **kwargs):
        step(self, *args, **kwargs)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row_means"] = torch.zeros(3)

    wrap(torch.optim.AdamW, "step", keeping)


def split_transfers():
    """Split every transfer of weights in halves."""

    def prepare_to_split(prepare, self, settings):
        prepare(self, settings)
        self.splits = True

    wrap(LayerPlanner, "plan_iteration", lambda plan, *of, **how: replace(plan(*of, **how), early=0.5))
    wrap(FssdpStrategy, "__init__", prepare_to_split)


def try_what_is_refused():
    training_run.before_iterations(lambda iteration, *built: iteration == 2 and _try_what_is_refused(*built))


def _try_what_is_refused(model, optimizer):
    """Each time one rank of four differs; all ranks must raise an error."""
    slots = next(layer.slots for layer in model[0].modules() if hasattr(layer, "slot_layer"))
    resharding, even, rank = slots.resharding, slots.owners, dist.get_rank()
    maps = [even.with_owners(np.roll(even.device_LE, shift, axis=1)) for shift in (1, 2)]
    expert = resharding.slots[0][0]
    member = next(m for m in optimizer.chained_optimizers if expert in m.buffers[0].param_to_bucket)
    group = next(group for group in member.optimizer.param_groups if group["params"])
    state = member.optimizer.state[group["params"][0]]

    def refused(words, error=ConfigurationError, new=maps[0]):
        with pytest.raises(error, match=words):
            slots.move_to(new)

    alone = [dist.new_group([member_rank]) for member_rank in range(dist.get_world_size())][rank]
    with pytest.raises(ConfigurationError, match="wanted every element on one rank"):
        replace(resharding, expert_data_parallel=alone)

    exp_avg, kind = state["exp_avg"], type(member)
    # Where a value is changed, its name, the odd rank's value, and the message.
    changes = [
        (group, "lr_mult", 0.5, "setting lr_mult of parameter .: 0.5 and 1.0"),
        (state, "step", state["step"] + 1, "state step of parameter .: 1.0 and 2.0"),
        (state, "exp_avg", exp_avg.bfloat16(), "got an optimizer with state exp_avg of .*bfloat16"),
        (state, "row_means", torch.zeros(3), r"state row_means of \(torch.Size\(\[3\]\)"),
        (state, "max_exp_avg_sq", torch.zeros_like(exp_avg), "names of tensors of parameter"),
        (vars(member.config), "optimizer_cpu_offload", True, "--optimizer-cpu-offload"),
    ]
    for odd_rank in (0, 3):
        for where, name, odd, message in changes:
            with patch.dict(where, {name: odd} if rank == odd_rank else {}):
                refused(message)
        if rank == odd_rank:
            member.__class__ = type("OtherOptimizer", (kind,), {})
        refused("in none of the optimizers .*OtherOptimizer")
        member.__class__ = kind
        refused("not the same on all", RuntimeError, maps[rank == odd_rank])
    refused("wanted 2 devices with 8 slots each", ValueError, OwnerMap.even(2, 8, 4))
    weights = member.buffers[0].param_data
    memory, kept = weights.untyped_storage(), weights.clone()
    memory.resize_(0)  # as verl offloads weights
    refused("because the host has offloaded it")
    memory.resize_(kept.nbytes)
    weights.copy_(kept)
    with patch.dict(state, {"exp_avg": exp_avg.to("meta")}):  # as verl offloads states
        assert {quantity.device for quantity in resharding.quantities()} == {expert.device}
    assert slots.move_to(even) is None
