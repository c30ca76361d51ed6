import json
import os

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostSettings
from megatron_fssdp.megatron_adapter.support.known_options import known_options
from megatron_fssdp.megatron_adapter.support.megatron_settings import OPTIONAL, MegatronSettings, attributes
from tests.support.python_process import ROOT, python_output

NAMES = """
import argparse, dataclasses, json
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import add_megatron_arguments
kinds = DistributedDataParallelConfig, OptimizerConfig, TransformerConfig
names = {kind.__name__: [one.name for one in dataclasses.fields(kind)] for kind in kinds}
names["Namespace"] = [one.dest for one in add_megatron_arguments(argparse.ArgumentParser())._actions]
print("NAMES", json.dumps(names))
"""


@pytest.mark.parametrize("checkout", ["", *filter(None, [os.environ.get("MEGATRON_LM_PATH")])])
def test_megatron_has_every_attribute_exactly_where_it_is_declared(checkout: str) -> None:
    path = os.pathsep.join(filter(None, (checkout, str(ROOT))))
    names = json.loads(python_output("-c", NAMES, PYTHONPATH=path).rpartition("NAMES")[2])
    found = {one: {kind for kind in names if one in names[kind]} for one in attributes()}
    absent = {one for one, kinds in found.items() if not kinds}
    for one in found.keys() - absent:
        assert found[one] == attributes()[one] - {OPTIONAL}, one
    optional = {one for one, declared in attributes().items() if OPTIONAL in declared}
    assert absent <= ({"kitchen_config_file"} if checkout else optional)
    assert optional <= known_options()


def test_the_first_source_with_a_value_counts() -> None:
    args = megatron_options.megatron_parser().parse_args(["--num-experts", "4", "--fp16"])
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=8)
    ddp = DistributedDataParallelConfig(use_megatron_fsdp=True)
    optimizer = OptimizerConfig(optimizer_cuda_graph=True)
    found = MegatronSettings.of(args, config, None, ddp, optimizer)
    assert (found.experts, found.fp16, found.other_ddp, found.other_states) == (8, True, True, True)
    alone = MegatronSettings.of(args)
    assert (alone.experts, alone.fp16, alone.other_ddp, alone.other_states) == (4, True, False, False)
    assert MegatronSettings.of(HostSettings((args, config, ddp, optimizer))) == found


def test_a_host_may_lack_settings() -> None:
    found = MegatronSettings.of(object())
    assert (found.experts, found.devices, found.parts, found.captured) == (0, 1, 1, frozenset())
    assert not found.saves
    assert found.ckpt_format is None


def test_modules_of_graphs_may_be_members_of_an_enumeration() -> None:
    attn, router = CudaGraphModule.attn, CudaGraphModule.moe_router
    for given, wanted in (
        (attn, {"attn"}),
        ([attn, router], {"attn", "moe_router"}),
        (["attn", "full"], {"attn"}),
        ("full", {"full"}),
        ([], {"full"}),
    ):
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
        assert MegatronSettings.of(config).captured == set()
        config.cuda_graph_impl, config.cuda_graph_modules = "transformer_engine", given
        assert MegatronSettings.of(config).captured == wanted
