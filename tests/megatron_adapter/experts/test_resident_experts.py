"""Resident replicas stay equal to their owners, and checkpoints do not contain them."""

import json
import os
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
from ..training_run import relative_difference, train

FLEXMOE = (
    "--moe-strategy flexmoe --moe-strategy-set slots=2 --moe-strategy-set placement_interval=2 "
    "--moe-strategy-set window=2 FSSDP_PROFILE_ITERATIONS=1"
)
# Learning rate and weight decay change by schedule, and gradients are clipped.
CHANGING = (
    "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay-incr-style linear --start-weight-decay 0.01 "
    "--end-weight-decay 0.1 --clip-grad 0.5 --adam-beta1 0.8 --adam-beta2 0.9"
)


def comparisons(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    """What each rank measured; there must have been replicas."""
    of_ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    assert sum(found["compared"] for found in of_ranks) > 2 * num_ranks, "there were hardly any replicas"
    return of_ranks


@pytest.mark.parametrize(
    "layout",
    [
        f"--expert-model-parallel-size 2 --bf16 --use-distributed-optimizer {CHANGING}",
        f"--expert-model-parallel-size 2 --calculate-per-token-loss --global-batch-size 16 {CHANGING}",
        pytest.param(
            "--expert-model-parallel-size 2 --calculate-per-token-loss --use-distributed-optimizer "
            "--clip-grad 0 --pipeline-model-parallel-size 2 --num-layers 4 "
            "--num-layers-per-virtual-pipeline-stage 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(f"--expert-model-parallel-size 4 {CHANGING}", marks=pytest.mark.slow),
        pytest.param(f"--expert-model-parallel-size 2 --bf16 {CHANGING}", marks=pytest.mark.slow),
        pytest.param("--expert-model-parallel-size 2 --optimizer sgd", marks=pytest.mark.slow),
    ],
)
def test_resident_replicas_stay_equal_to_their_owners(layout: str, text_data: Path, tmp_path: Path) -> None:
    train(
        4,
        f"{layout} --train-iters 8 {FLEXMOE}",
        text_data,
        before=compare_in_training,
        env={"MEASURED": str(tmp_path)},
    )
    of_ranks = comparisons(tmp_path, 4)
    for found in of_ranks:
        # Sums over data-parallel ranks can be formed in another order for a replica.
        assert found["difference"] <= (1e-2 if "bf16" in layout else 1e-6)
        assert found["allocated"] == found["accounted"]


def test_per_token_losses_equal_plain_expert_parallelism(text_data: Path) -> None:
    layout = (
        "--expert-model-parallel-size 2 --calculate-per-token-loss --use-distributed-optimizer "
        f"--global-batch-size 16 --train-iters 8 {CHANGING}"
    )
    wanted = train(4, f"{layout} --moe-strategy ep", text_data)
    run = train(4, f"{layout} {FLEXMOE}", text_data, before=cheap_links)
    assert relative_difference(run.losses, wanted.losses) <= 1e-5
    assert relative_difference(run.grad_norms, wanted.grad_norms) <= 1e-4


def test_replicas_count_the_steps_of_their_owners(text_data: Path, tmp_path: Path) -> None:
    train(
        2,
        f"--expert-model-parallel-size 2 {CHANGING} --train-iters 6 {FLEXMOE}",
        text_data,
        before=compare_under_adam_of_groups,
        env={"MEASURED": str(tmp_path)},
    )
    assert max(found["difference"] for found in comparisons(tmp_path, 2)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_checkpoints_hold_each_expert_once(optimizer: str, text_data: Path, tmp_path: Path) -> None:
    layout = (
        f"--expert-model-parallel-size 2 {optimizer} --ckpt-format torch_dist --no-load-rng --no-save-rng "
        f"--train-iters 8 {CHANGING}"
    )
    whole = train(2, f"{layout} --moe-strategy ep", text_data)
    keys = {}
    for writer, readers in (("ep", [FLEXMOE]), ("flexmoe", ["--moe-strategy ep", FLEXMOE])):
        folder = tmp_path / writer
        chosen = FLEXMOE if writer == "flexmoe" else "--moe-strategy ep"
        begun = train(
            2,
            f"{layout} {chosen} --exit-interval 5 --save {folder} --save-interval 5",
            text_data,
            before=cheap_links,
        )
        assert relative_difference(begun.losses, whole.losses[:5]) <= 1e-5
        metadata = FileSystemReader(folder / "iter_0000005").read_metadata()
        keys[writer] = {
            key: getattr(value, "size", None) for key, value in metadata.state_dict_metadata.items()
        }
        for reader in readers:
            rest = train(2, f"{layout} {reader} --load {folder}", text_data, before=cheap_links)
            assert relative_difference(rest.losses, whole.losses[5:]) <= 1e-5
    assert keys["flexmoe"] == keys["ep"]


def test_fp16_is_refused() -> None:
    sessions = [
        StrategySession("flexmoe", FlexmoeSettings()),
        StrategySession("smartmoe", SmartmoeSettings()),
    ]
    model = SimpleNamespace(num_moe_experts=8, expert_model_parallel_size=2)
    for session in sessions:
        session.check_model(model)
    model.fp16 = True
    with pytest.raises(ConfigurationError, match="does not support fp16"):
        sessions[0].check_model(model)
    sessions[1].check_model(model)


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
    from megatron_fssdp.megatron_adapter.training.iteration_driver import IterationDriver
    from megatron_fssdp.megatron_adapter.training.memory_report import account_memory

    cheap_links()
    end = IterationDriver.end
    found: dict[str, Any] = {"compared": 0, "difference": 0.0}

    def end_and_compare(driver: Any) -> Any:
        loads = end(driver)
        residents, slots = driver._residents, driver._session.slots
        device = dist.get_rank(driver._expert_parallel)
        owners, per_layer = slots.owners, residents._map.slots
        places: dict[tuple[str, int, int], int] = {}
        for layer in range(owners.num_layers):
            for expert, slot in owners.slots_on(device, layer).items():
                places["owned", layer, expert] = slot
            for expert, slot in residents._map.held_by(device, layer).items():
                places["replica", layer, expert] = owners.slots_per_device + layer * per_layer + slot
        here = {key: [] for key in places}
        residents._copy_settings()
        for quantity in residents._contents.quantities():
            rows = torch.empty(len(places), quantity.num_elements, dtype=quantity.dtype)
            quantity.read(list(places.values()), 0, rows)
            for key, row in zip(places, rows, strict=True):
                here[key].append(row)
        everywhere: list[Any] = [None] * dist.get_world_size(driver._expert_parallel)
        dist.all_gather_object(everywhere, here, group=driver._expert_parallel)
        owned = {key[1:]: rows for held in everywhere for key, rows in held.items() if key[0] == "owned"}
        for (kind, *expert), rows in here.items():
            if kind == "replica":
                found["compared"] += 1
                for got, wanted in zip(rows, owned[tuple(expert)], strict=True):
                    scale = float(wanted.abs().max()) or 1.0
                    difference = float((got.float() - wanted.float()).abs().max()) / scale
                    found["difference"] = max(found["difference"], difference)
        memory = account_memory(driver._session, driver._args, driver.held)
        parameters = [parameter for slot in residents.parameters for parameter in slot]
        found["allocated"] = {
            "parameters": sum(p.numel() * p.element_size() for p in parameters),
            "optimizer": _of_all_copies(driver, _state_bytes(residents._resident_optimizer)),
        }
        copies = driver._args.data_parallel_size // dist.get_world_size(driver._expert_parallel)
        found["accounted"] = {
            "parameters": memory.replica_parameters_bytes,
            "optimizer": copies * memory.replica_optimizer_bytes,
        }
        (Path(os.environ["MEASURED"]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
        return loads

    IterationDriver.end = end_and_compare


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


def _state_bytes(optimizer: Any) -> int:
    """Optimizer states of the parameters' sizes, and master weights that are not views of the parameters."""
    total = 0
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(member, "is_stub_optimizer", False):
            continue
        for group in member.optimizer.param_groups:
            for master in group["params"]:
                states = member.optimizer.state.get(master, {}).values()
                total += sum(4 * s.numel() for s in states if torch.is_tensor(s) and s.dim())
                total += 4 * master.numel() if member.config.bf16 else 0
    return total


def _of_all_copies(driver: Any, num_bytes: int) -> int:
    from megatron.core import parallel_state

    total = torch.tensor(num_bytes)
    dist.all_reduce(total, group=parallel_state.get_expert_data_parallel_group())
    return int(total)
