"""Resident replicas stay equal to their owners, and checkpoints do not contain them."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from torch.distributed.checkpoint import FileSystemReader
from torch.nn import Parameter

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.experts.resident_experts import ResidentExperts, _start_states_like
from megatron_fssdp.megatron_adapter.iterations.iteration_driver import IterationDriver
from megatron_fssdp.megatron_adapter.iterations.training_reports import account_memory
from tests.support.training_preload import run_megatron_ranks

from ..held_bytes import num_bytes, state_bytes
from ..iterations.host_loops import Host, assert_equal, trained
from ..training.parity.test_strategy_parity import cheap_links
from ..training_run import note, relative_difference, rows, slow, train, wrap

FLEXMOE = "flexmoe slots=2 placement_interval=1 window=1 FSSDP_PROFILE_ITERATIONS=1"
# Learning rate and weight decay change by schedule, and gradients are clipped.
CHANGING = (
    "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay-incr-style linear --start-weight-decay 0.01 "
    "--end-weight-decay 0.1 --clip-grad 0.5 {SHORT_AVERAGES}"
)
LAYOUTS = rows(
    """
    bf16, distributed | {EP2} --bf16 {DISTRIBUTED} {CHANGING}
    another Adam | {EP2} {CHANGING} | counts in groups
    loss per token | {EP2} --calculate-per-token-loss {BATCH16} {CHANGING}
    interleaved pipeline | {EP2} --calculate-per-token-loss {DISTRIBUTED} --clip-grad 0 {INTERLEAVED}
    no copies | {EP4} {CHANGING}
    sgd | {EP2} --optimizer sgd
    """,
    CHANGING=CHANGING,
)
FIRST, SECOND, *SLOW = LAYOUTS
EXPERT = {"is_expert_parallel": True}  # of a parameter group


@pytest.mark.parametrize("name", [FIRST, SECOND, *slow(SLOW)])
def test_resident_replicas_stay_equal_to_their_owners(name, text_data):
    arguments, *adam = LAYOUTS[name]
    before = partial(compare_in_training, counts_in_groups=adam == ["counts in groups"])
    run = train(4, f"{arguments} --train-iters 4", text_data, strategy=FLEXMOE, before=before)
    of_ranks = list({seen["rank"]: seen for seen in run.notes}.values())  # what each rank measured last
    assert len(of_ranks) == 4
    assert sum(seen["compared"] for seen in of_ranks) > 8, "there were hardly any replicas"
    for seen in of_ranks:
        # Sums over data-parallel ranks can be formed in another order for a replica.
        assert seen["difference"] <= (1e-2 if "bf16" in arguments else 1e-6)
        assert seen["allocated"] == seen["accounted"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_checkpoints_hold_each_expert_once(optimizer, text_data, tmp_path):
    layout = f"{{EP2}} {optimizer} {{TORCH_DIST}} --no-load-rng --no-save-rng --train-iters 8 {CHANGING}"
    whole, keys = train(2, layout, text_data, strategy="ep"), {}
    for writer, readers in (("ep", [FLEXMOE]), (FLEXMOE, ["ep", FLEXMOE])):
        folder = tmp_path / writer.split()[0]
        saving = f"{layout} --exit-interval 5 --save {folder} --save-interval 5"
        begun = train(2, saving, text_data, strategy=writer, before=cheap_links)
        assert relative_difference(begun.losses, whole.losses[:5]) <= 1e-5
        entries = FileSystemReader(folder / "iter_0000005").read_metadata().state_dict_metadata
        keys[writer] = {key: getattr(value, "size", None) for key, value in entries.items()}
        for reader in readers:
            loading = f"{layout} --load {folder}"
            rest = train(2, loading, text_data, strategy=reader, before=cheap_links)
            assert relative_difference(rest.losses, whole.losses[5:]) <= 1e-5
    assert keys[FLEXMOE] == keys["ep"]


def train_without_gloo_groups(rank, world_size):
    cheap_links()
    parallel_state.destroy_model_parallel()
    sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    Host.has_gloo_groups = False
    flexmoe = {"slots": 2, "placement_interval": 1, "window": 1}
    return [trained(strategy, scaling, 9) for strategy in (("none", {}), ("flexmoe", flexmoe))]


def scaling(host, iteration):
    """Gradients are scaled between passes and twice after them, by other numbers in each iteration."""
    host.reset()
    loss = 0.0
    for factor in (4.0 if iteration % 2 else 0.25, 0.5):
        of_batch = host.forward()
        of_batch.backward()
        host.model.scale_gradients(factor)
        loss += float(of_batch)
    host.finalize()
    host.model.scale_gradients(4.0)
    host.step(loss)


def test_a_host_may_have_no_groups_of_gloo():
    """NeMo-RL makes none, and scales gradients by itself."""
    ranks = run_megatron_ranks(train_without_gloo_groups, 2, ep=2, env={"FSSDP_PROFILE_ITERATIONS": "1"})
    assert_equal(ranks, ["flexmoe"])
    assert all(flexmoe.replicas[3] for _, flexmoe in ranks)


def test_sums_on_their_way_are_no_change_by_the_loop():
    """Where a later model chunk has no experts, DDP starts to reduce it while sums of the last one travel.

    A thread of gloo counts a change when its average arrives, which DDP has started beside the passes.
    """
    gradients = SimpleNamespace(num_complete=0, is_home=True)
    buffer = SimpleNamespace(grad_data=torch.zeros(1))
    residents = object.__new__(ResidentExperts)
    residents._owned = SimpleNamespace(layers=[SimpleNamespace(gradients=gradients)])
    group = SimpleNamespace(grad_reduce_handle=None)
    chunk = {"expert_parallel_buffers": [buffer], "expert_parallel_bucket_groups": [group]}
    residents._chunks = [SimpleNamespace(**chunk)]
    residents._map, residents._followed = SimpleNamespace(expert_LDW=np.zeros(1)), ([], [])
    steps = ((1, False, None), (2, True, None), (2, True, object()), (2, True, None))
    for gradients.num_complete, gradients.is_home, group.grad_reduce_handle in steps:
        with residents.following():
            pass
        if group.grad_reduce_handle is not None or not gradients.is_home:
            buffer.grad_data += 1
    buffer.grad_data += 1
    with pytest.raises(ConfigurationError, match="got gradients of experts that the loop has changed"):
        residents.following().__enter__()


def test_a_layer_wise_optimizer_is_refused():
    optimizer = type("LayerWiseDistributedOptimizer", (), {"chained_optimizers": ()})()
    with pytest.raises(ConfigurationError, match="got Megatron's layer-wise optimizer"):
        ResidentExperts(None, 1, [], optimizer, None)


def test_states_begin_like_those_of_parameters_with_equal_settings():
    """Megatron's Muon gives weights a momentum, and Adam trains biases."""

    def optimizers():
        groups = [
            {"params": [Parameter(torch.ones(shape))], **EXPERT, "wd_mult": float(len(shape))}
            for shape in ((2, 2), (2,))
        ]
        return [torch.optim.SGD(groups[:1], lr=0.1, momentum=0.9), torch.optim.Adam(groups[1:])]

    model, residents = optimizers(), optimizers()
    for optimizer in model:
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    ours, theirs = (
        SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=optimizer) for optimizer in side])
        for side in (residents, model)
    )
    _start_states_like(theirs, ours)
    momentum, adam = (next(iter(optimizer.state.values())) for optimizer in residents)
    assert set(momentum) == {"momentum_buffer"}
    assert set(adam) == {"step", "exp_avg", "exp_avg_sq"}
    assert float(adam["step"]) == 1
    assert not adam["exp_avg"].any()


# ---------------------------------------------------------------- on the ranks


def compare_in_training(*, counts_in_groups):
    """At the end of every iteration, compare the contents of replicas with those of their owners."""
    cheap_links()
    if counts_in_groups:
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = AdamOfGroups, False
    compared = {"compared": 0, "difference": 0.0}

    def end_and_compare(end, driver):
        loads = end(driver)
        residents, owners = driver._residents, driver._session.slots.owners
        group, held = residents._contents.expert_parallel, residents._map
        places = {}
        for layer in range(owners.num_layers):
            first = owners.slots_per_device + layer * held.slots
            for expert, slot in owners.slots_on(group.rank(), layer).items():
                places["owned", layer, expert] = slot
            for expert, slot in held.held_by(group.rank(), layer).items():
                places["replica", layer, expert] = first + slot
        here = {key: [] for key in places}
        residents._copy_settings()
        for quantity in residents._contents.quantities():
            rows = torch.empty(len(places), quantity.num_elements, dtype=quantity.dtype)
            quantity.read(list(places.values()), 0, rows)
            for key, row in zip(places, rows, strict=True):
                here[key].append(row)
        everywhere = [None] * group.size()
        dist.all_gather_object(everywhere, here, group=group)
        owned = {key[1:]: rows for rank in everywhere for key, rows in rank.items() if key[0] == "owned"}
        for (kind, *expert), rows in here.items():
            compared["compared"] += kind == "replica"
            for got, wanted in zip(rows, owned[tuple(expert)], strict=True):
                difference = (got.float() - wanted.float()).abs().max() / (wanted.abs().max() or 1.0)
                compared["difference"] = max(compared["difference"], float(difference))
        memory = account_memory(driver._session, driver._host, driver.held)
        parameters = [parameter for slot in residents.parameters for parameter in slot]
        kept = torch.tensor(state_bytes(residents._resident_optimizer, parameters))
        dist.all_reduce(kept, group=parallel_state.get_expert_data_parallel_group())
        copies = driver._host.data_parallel_size // group.size()
        allocated = num_bytes(parameters), int(kept)
        accounted = memory.replica_parameters_bytes, copies * memory.replica_optimizer_bytes
        note({"rank": dist.get_rank(), **compared, "allocated": allocated, "accounted": accounted})
        return loads

    wrap(IterationDriver, "end", end_and_compare)


class AdamOfGroups(torch.optim.Optimizer):
    """Adam that counts its steps in parameter groups, as Transformer Engine's and Apex's do."""

    def __init__(self, params, **settings):
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                unbiased = []
                for moment, beta, value in zip(
                    ("exp_avg", "exp_avg_sq"), group["betas"], (gradient, gradient**2), strict=True
                ):
                    mean = self.state[parameter].setdefault(moment, torch.zeros_like(parameter))
                    unbiased.append(mean.lerp_(value, 1 - beta) / (1 - beta ** group["step"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * unbiased[0] / (unbiased[1].sqrt() + group["eps"]))
