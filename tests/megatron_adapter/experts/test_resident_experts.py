"""Resident replicas stay equal to their owners, and checkpoints do not contain them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.nn import Parameter

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.shipped_settings import FlexmoeSettings, SmartmoeSettings
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession

from ..training.parity.test_strategy_parity import cheap_links
from ..training_run import TrainingRun, assert_close, note, relative_difference, rows, slow, train, wrap
from ..uneven_owners import state_bytes

FLEXMOE = "flexmoe slots=2 placement_interval=2 window=2 FSSDP_PROFILE_ITERATIONS=1"
# Learning rate and weight decay change by schedule, and gradients are clipped.
CHANGING = (
    "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay-incr-style linear --start-weight-decay 0.01 "
    "--end-weight-decay 0.1 --clip-grad 0.5 {SHORT_AVERAGES}"
)
LAYOUTS = rows(
    """
    bf16, distributed | {EP2} --bf16 {DISTRIBUTED} {CHANGING}
    loss per token | {EP2} --calculate-per-token-loss {BATCH16} {CHANGING}
    interleaved pipeline | {EP2} --calculate-per-token-loss {DISTRIBUTED} --clip-grad 0 {INTERLEAVED}
    no copies | {EP4} {CHANGING}
    bf16 | {EP2} --bf16 {CHANGING}
    sgd | {EP2} --optimizer sgd
    """,
    CHANGING=CHANGING,
)
FIRST, SECOND, *SLOW = LAYOUTS


def last_notes(run: TrainingRun, num_ranks: int) -> list[dict[str, Any]]:
    """What each rank measured last; there must have been replicas."""
    of_ranks = list({found["rank"]: found for found in run.notes}.values())
    assert len(of_ranks) == num_ranks
    assert sum(found["compared"] for found in of_ranks) > 2 * num_ranks, "there were hardly any replicas"
    return of_ranks


@pytest.mark.parametrize("name", [FIRST, SECOND, *slow(SLOW)])
def test_resident_replicas_stay_equal_to_their_owners(name: str, text_data: Path) -> None:
    arguments = f"{LAYOUTS[name][0]} --train-iters 8"
    run = train(4, arguments, text_data, strategy=FLEXMOE, before=compare_in_training)
    for found in last_notes(run, 4):
        # Sums over data-parallel ranks can be formed in another order for a replica.
        assert found["difference"] <= (1e-2 if "bf16" in arguments else 1e-6)
        assert found["allocated"] == found["accounted"]


def test_per_token_losses_equal_plain_expert_parallelism(text_data: Path) -> None:
    layout = f"{{EP2}} --calculate-per-token-loss {{DISTRIBUTED}} {{BATCH16}} --train-iters 8 {CHANGING}"
    wanted = train(4, layout, text_data, strategy="ep")
    assert_close(train(4, layout, text_data, strategy=FLEXMOE, before=cheap_links), wanted)


def test_replicas_count_the_steps_of_their_owners(text_data: Path) -> None:
    arguments = f"{{EP2}} {CHANGING} --train-iters 6"
    run = train(2, arguments, text_data, strategy=FLEXMOE, before=compare_under_adam_of_groups)
    assert max(found["difference"] for found in last_notes(run, 2)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_checkpoints_hold_each_expert_once(optimizer: str, text_data: Path, tmp_path: Path) -> None:
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


def test_fp16_is_refused() -> None:
    resident = StrategySession("flexmoe", FlexmoeSettings())
    model = SimpleNamespace(num_moe_experts=8, expert_model_parallel_size=2)
    resident.check_model(model)
    model.fp16 = True
    with pytest.raises(ConfigurationError, match="does not support fp16"):
        resident.check_model(model)
    StrategySession("smartmoe", SmartmoeSettings()).check_model(model)


class LayerWiseDistributedOptimizer:
    chained_optimizers = ()


def test_a_layer_wise_optimizer_is_refused() -> None:
    from megatron_fssdp.megatron_adapter.experts.resident_experts import ResidentExperts

    nothing: Any = None
    with pytest.raises(ConfigurationError, match="got Megatron's layer-wise optimizer"):
        ResidentExperts(nothing, 1, [], LayerWiseDistributedOptimizer(), nothing)


def weights_and_biases() -> SimpleNamespace:
    """Return an optimizer like Megatron's Muon: weights have a momentum, and Adam trains biases."""
    weight, bias = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    groups = [
        {"params": [parameter], "is_expert_parallel": True, "wd_mult": weight_decay}
        for parameter, weight_decay in ((weight, 1.0), (bias, 0.0))
    ]
    inner = [torch.optim.SGD(groups[:1], lr=0.1, momentum=0.9), torch.optim.Adam(groups[1:])]
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=one) for one in inner])


def test_states_begin_like_those_of_parameters_with_equal_settings() -> None:
    from megatron_fssdp.megatron_adapter.experts.resident_experts import _start_states_like

    model, residents = weights_and_biases(), weights_and_biases()
    for member in model.chained_optimizers:
        for group in member.optimizer.param_groups:
            group["params"][0].grad = torch.ones_like(group["params"][0])
        member.optimizer.step()
    _start_states_like(model, residents)
    names = [
        {name for state in member.optimizer.state.values() for name in state}
        for member in residents.chained_optimizers
    ]
    assert names == [{"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}]
    adam = residents.chained_optimizers[1].optimizer
    state = adam.state[adam.param_groups[0]["params"][0]]
    assert float(state["step"]) == 1
    assert not state["exp_avg"].any()


# ---------------------------------------------------------------- on the ranks


def compare_in_training() -> None:
    """At the end of every iteration, compare the contents of replicas with those of their owners."""
    from megatron.core import parallel_state

    from megatron_fssdp.megatron_adapter.training.iteration_driver import IterationDriver
    from megatron_fssdp.megatron_adapter.training.memory_report import account_memory

    cheap_links()
    found: dict[str, Any] = {"compared": 0, "difference": 0.0}

    def end_and_compare(end: Any, driver: Any) -> Any:
        loads = end(driver)
        residents, owners = driver._residents, driver._session.slots.owners
        group = residents._contents.expert_parallel
        device = group.rank()
        places: dict[tuple[str, int, int], int] = {}
        for layer in range(owners.num_layers):
            for expert, slot in owners.slots_on(device, layer).items():
                places["owned", layer, expert] = slot
            for expert, slot in residents._map.held_by(device, layer).items():
                number = owners.slots_per_device + layer * residents._map.slots + slot
                places["replica", layer, expert] = number
        here = {key: [] for key in places}
        residents._copy_settings()
        for quantity in residents._contents.quantities():
            rows = torch.empty(len(places), quantity.num_elements, dtype=quantity.dtype)
            quantity.read(list(places.values()), 0, rows)
            for key, row in zip(places, rows, strict=True):
                here[key].append(row)
        everywhere: list[Any] = [None] * group.size()
        dist.all_gather_object(everywhere, here, group=group)
        owned = {key[1:]: rows for held in everywhere for key, rows in held.items() if key[0] == "owned"}
        for (kind, *expert), rows in here.items():
            for got, wanted in zip(rows, owned[tuple(expert)], strict=True):
                difference = (got.float() - wanted.float()).abs().max() / (wanted.abs().max() or 1.0)
                found["difference"] = max(found["difference"], float(difference))
            found["compared"] += kind == "replica"
        memory = account_memory(driver._session, driver._args, driver.held)
        parameters = [parameter for slot in residents.parameters for parameter in slot]
        kept = torch.tensor(state_bytes(residents._resident_optimizer, parameters))
        dist.all_reduce(kept, group=parallel_state.get_expert_data_parallel_group())
        copies = driver._args.data_parallel_size // group.size()
        allocated = sum(p.numel() * p.element_size() for p in parameters), int(kept)
        accounted = memory.replica_parameters_bytes, copies * memory.replica_optimizer_bytes
        note({"rank": dist.get_rank(), **found, "allocated": allocated, "accounted": accounted})
        return loads

    wrap(IterationDriver, "end", end_and_compare)


class AdamOfGroups(torch.optim.Optimizer):
    """Adam that counts its steps in parameter groups, as Transformer Engine's and Apex's do."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if gradient is None:
                    continue
                for moment, beta, value in zip(
                    ("exp_avg", "exp_avg_sq"), group["betas"], (gradient, gradient**2), strict=True
                ):
                    state.setdefault(moment, torch.zeros_like(parameter)).lerp_(value, 1 - beta)
                mean, square = (
                    state[moment] / (1 - beta ** group["step"])
                    for moment, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
                )
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


def compare_under_adam_of_groups() -> None:
    from megatron.core import optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = AdamOfGroups, False
    compare_in_training()
