from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, load_yaml, validate
from megatron_fssdp.config.run.json_schema import run_config_schema_text
from megatron_fssdp.config.run.megatron_arguments import (
    Installation,
    TokenizedData,
    megatron_arguments,
    trace_folder,
)
from megatron_fssdp.config.run.run_config import RunConfig

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = CONFIGS / "gpt_moe_tiny.yaml"
CPU = Installation(on_cpu=True, has_transformer_engine=False)
DATA = TokenizedData(
    Path("d/text"), vocab_size=2048, eod_id=2047, num_documents=50, cache_dir=Path("d/cache")
)


def tiny(*overrides: str) -> RunConfig:
    return validate(RunConfig, apply_overrides(load_yaml(TINY), overrides), "tiny.yaml")


def arguments(config: RunConfig, installation: Installation = CPU, **kwargs) -> list[str]:
    return megatron_arguments(config, DATA, installation, Path("runs/x"), resume=kwargs.get("resume", False))


def value_of(words: list[str], flag: str) -> str:
    assert words.count(flag) == 1, f"{flag} is given {words.count(flag)} times"
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid_and_name_the_schema(path):
    validate(RunConfig, load_yaml(path), str(path))
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")


def test_committed_schema_is_up_to_date():
    committed = (CONFIGS / "schema.json").read_text(encoding="utf-8")
    assert committed == run_config_schema_text(), "run `megatron-fssdp schema > configs/schema.json`"


def test_every_field_is_documented():
    for section in ("model", "data", "parallelism", "training", "strategy"):
        for name, field in RunConfig.model_fields[section].annotation.model_fields.items():
            assert field.description, f"{section}.{name}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.num_experts=6"], "parallelism.expert 4 does not divide model.num_experts 6"),
        (["model.num_experts=null"], "needs an MoE model"),
        (["model.moe_top_k=9"], "model.moe_top_k 9 is larger than model.num_experts 8"),
        (["model.num_attention_heads=3"], "does not divide model.hidden_size 64"),
        (["model.moe_layer_freq=[0, 1]"], "lists 2 layers, wanted model.num_layers 4"),
        (["model.moe_shared_expert_size=64", "model.linear_bias=true"], "no biases in shared experts"),
        (["model.moe_aux_loss_coeff=0.1"], "has no effect while model.moe_balancing is none"),
        (["parallelism.nproc_per_node=6"], "does not divide the 6 ranks"),
        (["parallelism.declared_nodes=3"], "all declared nodes have the same number of ranks"),
        (["parallelism.tensor=2", "strategy={name: none}"], "needs parallelism.sequence: true"),
        (
            ["parallelism.tensor=4", "parallelism.sequence=true", "model.num_query_groups=2"],
            "does not divide model.num_query_groups 2",
        ),
        (
            ["parallelism.expert=2", "parallelism.expert_tensor=2", "model.linear_bias=true"],
            "parallelism.expert_tensor 2 and model.linear_bias exclude each other",
        ),
        (["parallelism.pipeline=4", "parallelism.expert=1", "model.num_layers=6"], "equal pipeline chunks"),
        (["parallelism.context=2", "training.device=cpu"], "Transformer Engine's attention"),
        (["parallelism.overlap_param_gather=true"], "needs distributed_optimizer"),
        (["training.global_batch_size=24"], "every rank processes whole micro-batches"),
        (["training.micro_batch_size=5"], "does not divide training.global_batch_size"),
        (["training.warmup_iterations=60"], "must be smaller than"),
        (["training.min_lr=1"], "larger than training.lr"),
        (
            ["training.precision=fp8"],
            "training.precision: got 'fp8' (string), wanted 'fp32', 'bf16' or 'fp16'",
        ),
        (["strategy.name=fsdp"], "did you mean 'fssdp'"),
        (["strategy.settings.slot=1"], "unknown key 'slot'"),
        (["strategy.settings.overlap_degree=0", "strategy.settings.slots=1"], "exclude each other"),
        (["data.vocab_size=10"], "greater than or equal to 257"),
        (["data.split=a,b"], "data.split"),
    ],
)
def test_contradictions_are_refused_with_the_reason(overrides, words):
    with pytest.raises(ConfigurationError) as caught:
        tiny(*overrides)
    message = str(caught.value)
    assert message.startswith("tiny.yaml: ")
    assert words in message
    assert "\n" not in message


def test_tensor_parallelism_does_not_switch_on_sequence_parallelism():
    words = arguments(tiny("parallelism.tensor=2"))
    assert value_of(words, "--tensor-model-parallel-size") == "2"
    assert "--sequence-parallel" not in words


def test_the_tiny_run_on_cpu_has_these_megatron_arguments():
    words = arguments(tiny())
    assert value_of(words, "--expert-model-parallel-size") == "4"
    assert value_of(words, "--moe-token-dispatcher-type") == "alltoall"
    assert value_of(words, "--distributed-backend") == "gloo"
    assert value_of(words, "--vocab-size") == "2048"
    assert value_of(words, "--null-tokenizer-eod-id") == "2047"
    assert value_of(words, "--save") == "runs/x/checkpoints"
    assert value_of(words, "--moe-strategy") == "fssdp"
    assert "--load" not in words
    settings = {words[i + 1] for i, word in enumerate(words) if word == "--moe-strategy-set"}
    assert settings == {"record_dir=runs/x", "nodes=2", "slots=2", "overlap_degree=8"}


def test_expert_tensor_parallelism_is_allowed_under_every_strategy():
    for name in ("none", "ep", "fssdp"):
        config = tiny("parallelism.expert=2", "parallelism.expert_tensor=2", f"strategy={{name: {name}}}")
        assert value_of(arguments(config), "--expert-tensor-parallel-size") == "2"


def test_a_distributed_optimizer_saves_checkpoints_that_other_layouts_can_load():
    """Re-sharding is on by default and refuses Megatron's default format."""
    word = "--dist-ckpt-optim-fully-reshardable"
    assert word in arguments(tiny("parallelism.distributed_optimizer=true"))
    assert word not in arguments(tiny())


def test_strategy_settings_are_passed_as_yaml_values():
    words = arguments(tiny("strategy.settings.slots=3", "strategy.settings.rematerialize=true"))
    assert "slots=3" in words
    assert "rematerialize=true" in words


def test_strategy_none_gets_no_topology_settings():
    words = arguments(tiny("strategy={name: none}"))
    assert not any(word.startswith("nodes=") for word in words)


def test_top_1_routing_gets_megatrons_pre_softmax():
    assert "--moe-router-pre-softmax" in arguments(tiny("model.moe_top_k=1"))
    assert "--moe-router-pre-softmax" not in arguments(tiny())


def test_strategies_train_under_tensor_parallelism_without_sequence_parallelism():
    for name in ("ep", "fssdp", "parm"):
        words = arguments(tiny("parallelism.tensor=2", f"strategy={{name: {name}}}"))
        assert value_of(words, "--tensor-model-parallel-size") == "2"
        assert "--sequence-parallel" not in words


def test_heads_norms_and_positions_become_megatron_arguments():
    words = arguments(
        tiny(
            *("model.num_attention_heads=3", "model.kv_channels=24", "model.qk_layernorm=true"),
            *("model.norm_epsilon=1e-6", "model.rotary_base=1000000"),
        )
    )
    assert value_of(words, "--kv-channels") == "24"
    assert value_of(words, "--norm-epsilon") == "1e-06"
    assert value_of(words, "--rotary-base") == "1000000"
    assert "--qk-layernorm" in words
    words = arguments(tiny("model.position_embedding=learned_absolute"))
    assert not {"--kv-channels", "--rotary-base", "--qk-layernorm"} & set(words)


def test_missing_or_refused_fusions_are_switched_off():
    plain = Installation(on_cpu=False, has_transformer_engine=False)
    assert {"--no-rope-fusion", "--no-masked-softmax-fusion"} < set(arguments(tiny(), plain))
    full = Installation(on_cpu=False, has_transformer_engine=True)
    assert "--no-rope-fusion" not in arguments(tiny(), full)
    grouped = arguments(tiny("strategy={name: none}", "model.linear_bias=true"), full)
    assert {"--moe-grouped-gemm", "--no-bias-dropout-fusion"} < set(grouped)
    assert "--no-bias-dropout-fusion" not in arguments(tiny("strategy={name: none}"), full)


def test_on_gpu_transformer_engine_is_used_when_installed():
    gpu = Installation(on_cpu=False, has_transformer_engine=True)
    words = arguments(tiny("training.precision=bf16"), gpu)
    assert value_of(words, "--transformer-impl") == "transformer_engine"
    assert value_of(words, "--distributed-backend") == "nccl"
    assert "--bf16" in words
    assert "--use-cpu-initialization" not in words
    plain = Installation(on_cpu=False, has_transformer_engine=False)
    assert value_of(arguments(tiny(), plain), "--transformer-impl") == "local"


def test_resume_loads_the_runs_own_checkpoints():
    assert value_of(arguments(tiny(), resume=True), "--load") == "runs/x/checkpoints"
    words = arguments(tiny("training.load_dir=elsewhere"))
    assert value_of(words, "--load") == "elsewhere"


def test_further_megatron_arguments_come_last():
    words = arguments(tiny('megatron_args=["--moe-router-force-load-balancing"]'))
    assert words[-1] == "--moe-router-force-load-balancing"


def test_a_training_board_is_written_only_where_requested():
    assert "--tensorboard-dir" not in arguments(tiny())
    assert value_of(arguments(tiny("training.tensorboard=true")), "--tensorboard-dir") == "runs/x/tensorboard"
    assert value_of(arguments(tiny("training.tensorboard=boards/y")), "--tensorboard-dir") == "boards/y"


def test_the_profiler_records_the_given_iterations() -> None:
    assert "--profile" not in arguments(tiny())
    run = tiny("training.profile.start=3", "training.profile.end=5", "training.profile.ranks=[0,2]")
    found = arguments(run)
    assert "--profile" in found
    assert "--use-pytorch-profiler" in found
    # Megatron writes the trace at the end step, and into a folder beside that of the board.
    assert (value_of(found, "--profile-step-start"), value_of(found, "--profile-step-end")) == ("3", "6")
    ranks = found.index("--profile-ranks")
    assert found[ranks + 1 : ranks + 3] == ["0", "2"]
    assert value_of(found, "--tensorboard-dir") == "runs/x/tensorboard"
    assert trace_folder(run.training, Path("runs/x")) == Path("runs/x/torch_profile")
    board = tiny("training.profile.start=3", "training.profile.end=5", "training.tensorboard=boards/y")
    assert value_of(arguments(board), "--tensorboard-dir") == "boards/y"
    assert trace_folder(board.training, Path("runs/x")) == Path("boards/torch_profile")
    for settings, message in (
        (("training.profile.start=3", "training.profile.end=2"), "end 2 is before"),
        (
            ("training.profile.start=1", "training.profile.end=60"),
            "must be smaller than training.iterations 60",
        ),
        (("training.profile.start=1", "training.profile.end=2", "training.profile.ranks=[-1]"), "from 0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            tiny(*settings)


def test_a_list_of_moe_layers_is_one_argument():
    words = arguments(tiny("model.moe_layer_freq=[0, 1, 0, 1]"))
    assert value_of(words, "--moe-layer-freq") == "[0,1,0,1]"


def test_external_data_is_passed_through_megatron_args():
    words = megatron_arguments(tiny("data.external=true"), None, CPU, Path("runs/x"), resume=False)
    assert "--data-path" not in words
    assert "--tokenizer-type" not in words


def test_data_splits_without_documents_are_refused():
    # Megatron would search an empty split for tokens forever.
    assert value_of(arguments(tiny()), "--split") == "1,0,0"
    assert value_of(arguments(tiny("training.eval_interval=10")), "--split") == "95,5,0"
    with pytest.raises(ConfigurationError, match="none of the 50 documents for the test data"):
        arguments(tiny("training.eval_interval=10", "data.split='969,30,1'"))
    with pytest.raises(ConfigurationError, match="none of the 50 documents for the training data"):
        arguments(tiny("training.eval_interval=10", "data.split='0,1'"))
