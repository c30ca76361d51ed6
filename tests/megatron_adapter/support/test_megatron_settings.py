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
    assert (asked.experts, asked.fp16, asked.other_ddp, asked.other_states) == (
        8,
        True,
        "use_megatron_fsdp",
        True,
    )
    alone = MegatronSettings.of(args)
    assert (alone.experts, alone.fp16, alone.other_ddp, alone.other_states) == (4, True, "", False)
    assert MegatronSettings.of(HostSettings((args, config, ddp, optimizer))) == asked


def test_a_host_may_lack_settings():
    asked = MegatronSettings.of(object())
    assert (asked.experts, asked.devices, asked.parts, asked.captured) == (0, 1, 1, frozenset())
    assert not asked.saves
    assert asked.ckpt_format is None


def test_modules_of_graphs_may_be_members_of_an_enumeration():
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


def test_graphs_may_have_the_old_name_of_their_modules():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    # Recipes of Megatron-Bridge set it where the new name has its default.
    config.cuda_graph_impl, config.cuda_graph_scope = "transformer_engine", ["moe_router"]
    assert MegatronSettings.of(config).captured == {"moe_router"}
