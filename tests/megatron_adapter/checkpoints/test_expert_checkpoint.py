"""Under any owner map, a sharded state dict has the entries of stock Megatron."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from megatron_fssdp.megatron_adapter.experts.expert_slots import StageOwners
from tests.support.training_preload import run_megatron_ranks

from ..grouped_linear import fake_grouped_experts
from ..layer.small_config import moe_config
from ..uneven_owners import even_stage, expert_modules, follow_all, random_stage

EXPERTS, DRAWS = 4, 4
SWIGLU = {"activation_func": functional.silu, "gated_linear_unit": True}
DENSE_BETWEEN = {"moe_layer_freq": [1, 1, 0, 1]}
KEY_NUMBERS = {"moe_layer_freq": [1, 1, 1, 1]}
BIASES = {"add_bias_linear": True}
SINGLETONS, GROUPED = "one tensor an expert", "grouped"
EP1, EP2, PP2 = {"ep": 1}, {"ep": 2}, {"ep": 2, "pp": 2}
VPP2, ETP2 = {**PP2, "vpp": 2}, {**EP2, "tp": 2, "etp": 2}

# ranks, config, parallel sizes, forms of experts
CASES: dict[str, tuple[int, dict[str, Any], dict[str, int], set[str]]] = {
    "swiglu, biases": (2, {**SWIGLU, **BIASES}, EP2, set()),
    "swiglu, every rank a copy": (2, SWIGLU, EP1, set()),
    "dense layers in between": (2, {**SWIGLU, **DENSE_BETWEEN}, EP2, set()),
    "grouped, gelu, biases": (2, BIASES, EP2, {GROUPED}),
    "grouped, swiglu, dense layers in between": (2, {**SWIGLU, **DENSE_BETWEEN}, EP2, {GROUPED}),
    "grouped singletons": (2, {**SWIGLU, **BIASES}, EP2, {GROUPED, SINGLETONS}),
    "2 stages, dense layers in between": (4, {**BIASES, **DENSE_BETWEEN}, PP2, set()),
    "2 stages of 2 chunks, key numbers": (4, {**SWIGLU, **KEY_NUMBERS}, VPP2, set()),
    "tensor parallel experts": (4, SWIGLU, ETP2, set()),
    "grouped, tensor parallel experts": (4, SWIGLU, ETP2, {GROUPED}),
    "copies of each expert": (4, SWIGLU, EP2, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_every_expert_is_stored_once_under_its_own_name(name: str) -> None:
    world_size, config, sizes, forms = CASES[name]
    ranks = run_megatron_ranks(_entries_on_rank, world_size, config, sizes, forms, **sizes)
    moved = 0
    for draw in range(1 + DRAWS):
        stock = [entry for rank in ranks for entry in rank[0]]
        ours = [entry for rank in ranks for entry in rank[1][draw]]
        assert len({entry[:3] for entry in stock if entry[-2]}) == len([e for e in stock if e[-2]]) > 0
        # Both have exactly the same pieces of the same tensors, with the same contents.
        assert sorted(ours) == sorted(stock)
        slots = [[entry[:3] for entry in rank[1][draw]] for rank in ranks]
        moved += slots != [[entry[:3] for entry in rank[0]] for rank in ranks]
        assert draw or not moved
    assert moved >= DRAWS - 1


def _entries_on_rank(
    rank: int, world_size: int, config: dict[str, Any], sizes: dict[str, int], forms: set[str]
) -> Any:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": SINGLETONS in forms}
    model = build_model(config, sizes, GROUPED in forms)
    modules = expert_modules(model)
    device = parallel_state.get_expert_model_parallel_group().rank()
    draws = [
        random_stage(np.random.default_rng(seed), sorted(modules), EXPERTS, sizes["ep"])
        for seed in range(DRAWS)
    ]
    even = even_stage(draws[0])
    _fill(modules, even, device)
    stock = _entries(model, metadata)
    current = [even]
    follow_all([modules[number] for number in even.layer_numbers], lambda: current[0])
    results = []
    for stage in (even, *draws):
        current[0] = stage
        _fill(modules, stage, device)
        results.append(_entries(model, metadata))
    return stock, results


def _fill(modules: dict[int, Any], stage: StageOwners, device: int) -> None:
    """Values that identify layer, expert, parameter and element."""
    for layer, number in enumerate(stage.layer_numbers):
        for index, (held_of, expert) in enumerate(stage.contents(device, layer)):
            for position, parameter in enumerate(_slot_parameters(modules[number], index)):
                base = 1000 * (position + 10 * (expert + EXPERTS * held_of))
                base += 1e6 * modules[number].tp_group.rank()
                parameter.data.copy_(base + torch.arange(parameter.numel()).view_as(parameter))


def _slot_parameters(experts: Any, index: int) -> list[torch.nn.Parameter]:
    """The Parameters of a slot, in the order of their names."""
    if hasattr(experts, "local_experts"):
        return [one for _, one in sorted(experts.local_experts[index].named_parameters())]
    endings = (f"weight{index}", f"bias{index}")
    return [one for name, one in sorted(experts.named_parameters()) if name.endswith(endings)]


def _entries(model: list[torch.nn.Module], metadata: dict[str, Any]) -> list[tuple[Any, ...]]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
    from megatron.core.dist_checkpointing.utils import nested_values

    entries = []
    for chunk in model:
        state = chunk.sharded_state_dict(metadata=dict(metadata))
        assert set(state) >= {name for name, _ in chunk.named_parameters() if "experts" in name}
        apply_factories(state)
        for entry in nested_values(state):
            form, values = (), []
            if isinstance(entry, ShardedTensor):
                form = (entry.local_shape, entry.axis_fragmentations, entry.prepend_axis_num)
                values = entry.data.detach().reshape(-1)[:2].tolist() if "experts" in entry.key else []
            place = (entry.key, tuple(entry.global_offset), tuple(entry.global_shape), type(entry).__name__)
            entries.append((*place, form, entry.replica_id, is_main_replica(entry.replica_id), values))
    return entries


def build_model(config: dict[str, Any], sizes: dict[str, int], grouped: bool) -> list[torch.nn.Module]:
    """This rank's model chunks of a stock GPT with four layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    layout: Any = {
        "pipeline_model_parallel_size": sizes.get("pp", 1),
        "virtual_pipeline_model_parallel_size": sizes.get("vpp"),
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "expert_tensor_parallel_size": sizes.get("etp", 1),
        "sequence_parallel": "tp" in sizes,
        "pipeline_dtype": torch.float32,
    }
    layout |= {"num_layers": 4, "num_attention_heads": 2, **config}
    settings = moe_config(sizes["ep"], 8, EXPERTS, **layout)
    chunks = []
    for stage in range(sizes["vpp"]) if "vpp" in sizes else [None]:
        spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, vp_stage=stage)
        for layer in spec.layer_specs if grouped else ():
            mlp = layer.submodules.mlp
            if hasattr(mlp.keywords["submodules"], "experts"):
                layer.submodules.mlp = partial(mlp.func, submodules=fake_grouped_experts(mlp))
        place = {"ignore_virtual": False, "vp_stage": stage}
        chunks.append(
            GPTModel(
                settings,
                spec,
                vocab_size=16,
                max_sequence_length=8,
                pre_process=parallel_state.is_pipeline_first_stage(**place),
                post_process=parallel_state.is_pipeline_last_stage(**place),
                vp_stage=stage,
            )
        )
    return chunks
