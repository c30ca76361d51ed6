import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostSettings
from megatron_fssdp.megatron_adapter.support.megatron_settings import MegatronSettings


def test_the_first_source_with_a_value_counts():
    args = megatron_options.megatron_parser().parse_args(["--num-experts", "4", "--fp16"])
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=8)
    ddp = DistributedDataParallelConfig(use_megatron_fsdp=True)
    optimizer = OptimizerConfig(optimizer_cuda_graph=True)
    asked = MegatronSettings.of(args, config, None, ddp, optimizer)
    given = asked.experts, asked.fp16, asked.other_ddp, asked.other_states
    assert given == (8, True, "use_megatron_fsdp", True)
    alone = MegatronSettings.of(args)
    assert (alone.experts, alone.fp16, alone.other_ddp, alone.other_states) == (4, True, "", False)
    assert MegatronSettings.of(HostSettings((args, config, ddp, optimizer))) == asked


def test_a_host_may_lack_settings():
    asked = MegatronSettings.of(object())
    assert (asked.experts, asked.devices, asked.parts, asked.captured) == (0, 1, 1, frozenset())
    assert not asked.saves
    assert asked.ckpt_format is None


ATTN, ROUTER = CudaGraphModule.attn, CudaGraphModule.moe_router


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("cuda_graph_modules", ATTN, {"attn"}),
        ("cuda_graph_modules", [ATTN, ROUTER], {"attn", "moe_router"}),
        ("cuda_graph_modules", ["attn", "full"], {"attn"}),
        ("cuda_graph_modules", "full", {"full"}),
        ("cuda_graph_modules", [], {"full"}),
        # Recipes of Megatron-Bridge set the old name where the new one has its default.
        ("cuda_graph_scope", ["moe_router"], {"moe_router"}),
    ],
)
def test_modules_of_graphs_have_two_names_and_may_be_members_of_an_enumeration(name, given, wanted):
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    assert MegatronSettings.of(config).captured == set()
    config.cuda_graph_impl = "transformer_engine"
    setattr(config, name, given)
    assert MegatronSettings.of(config).captured == wanted
