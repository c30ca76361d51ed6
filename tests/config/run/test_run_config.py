from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, load_yaml, validate
from megatron_fssdp.config.run.megatron_arguments import (
    Installation,
    TokenizedData,
    megatron_arguments,
    trace_folder,
)
from megatron_fssdp.config.run.megatron_options import options, plain, problem
from megatron_fssdp.config.run.run_config import SECTIONS, RunConfig

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = CONFIGS / "gpt_moe_tiny.yaml"
OWN = ("parallelism.expert_tensor_parallel_size=1",)  # Megatron's default is the size of the model
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


def test_declared_keys_are_the_packages_own_or_megatrons_arguments_with_its_defaults():
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            if name in model.own_keys():
                assert name not in options()
                continue
            assert name in options(), f"{section}.{name}"
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            if not field.is_required():
                assert problem(name, default) == ""
            if default is not None and name not in ("lr", "micro_batch_size") and not field.is_required():
                assert plain(options()[name].default) == plain(default), f"{section}.{name}"
    for name, field in RunConfig.model_fields["data"].annotation.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["model.num_experts=6"],
            "parallelism.expert_model_parallel_size 4 does not divide model.num_experts 6",
        ),
        (["model.num_experts=null"], "needs an MoE model"),
        (["model.moe_router_topk=9"], "model.moe_router_topk 9 is larger than model.num_experts 8"),
        (["model.num_attention_heads=3"], "does not divide model.hidden_size 64"),
        (["model.moe_layer_freq=[0, 1]"], "lists 2 layers, wanted model.num_layers 4"),
        (
            ["model.moe_shared_expert_intermediate_size=64", "model.add_bias_linear=true"],
            "no biases in shared experts",
        ),
        (
            ["model.moe_aux_loss_coeff=0.1"],
            "has no effect with model.moe_router_load_balancing_type none",
        ),
        (["parallelism.nproc_per_node=6"], "does not divide the 6 ranks"),
        (
            ["parallelism.declared_nodes=3"],
            "does not divide the 4 ranks (4 × 1 machines), but nodes are equal",
        ),
        (
            ["parallelism.tensor_model_parallel_size=2", *OWN, "strategy={name: none}"],
            "needs parallelism.sequence_parallel: true",
        ),
        (
            [
                "parallelism.tensor_model_parallel_size=4",
                *OWN,
                "parallelism.sequence_parallel=true",
                "model.num_query_groups=2",
                "model.group_query_attention=true",
            ],
            "does not divide model.num_query_groups 2",
        ),
        (
            [
                "parallelism.expert_model_parallel_size=2",
                "parallelism.expert_tensor_parallel_size=2",
                "model.add_bias_linear=true",
            ],
            "no biases in experts that are split over ranks (expert_tensor_parallel_size 2)",
        ),
        (
            [
                "parallelism.pipeline_model_parallel_size=4",
                "parallelism.expert_model_parallel_size=1",
                "model.num_layers=6",
            ],
            "equal pipeline chunks",
        ),
        (["parallelism.context_parallel_size=2", "training.device=cpu"], "Transformer Engine's attention"),
        (["parallelism.overlap_param_gather=true"], "needs use_distributed_optimizer"),
        (["training.global_batch_size=24"], "every rank processes whole micro-batches"),
        (["training.micro_batch_size=5"], "does not divide training.global_batch_size"),
        (["training.lr_warmup_iters=60"], "must be smaller than"),
        (["training.min_lr=1"], "larger than training.lr"),
        (
            ["training.bf16=fp8"],
            "training.bf16: got 'fp8' (string), wanted true or false",
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
    words = arguments(tiny("parallelism.tensor_model_parallel_size=2", *OWN))
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
        config = tiny(
            "parallelism.expert_model_parallel_size=2",
            "parallelism.expert_tensor_parallel_size=2",
            f"strategy={{name: {name}}}",
        )
        assert value_of(arguments(config), "--expert-tensor-parallel-size") == "2"


def test_a_distributed_optimizer_saves_checkpoints_that_other_layouts_can_load():
    """Re-sharding is on by default and refuses Megatron's default format."""
    word = "--dist-ckpt-optim-fully-reshardable"
    assert word in arguments(tiny("parallelism.use_distributed_optimizer=true"))
    assert word not in arguments(tiny())


def test_strategy_settings_are_passed_as_yaml_values():
    words = arguments(tiny("strategy.settings.slots=3", "strategy.settings.rematerialize=true"))
    assert "slots=3" in words
    assert "rematerialize=true" in words


def test_strategy_none_gets_no_topology_settings():
    words = arguments(tiny("strategy={name: none}"))
    assert not any(word.startswith("nodes=") for word in words)


def test_top_1_routing_gets_megatrons_pre_softmax():
    assert "--moe-router-pre-softmax" in arguments(tiny("model.moe_router_topk=1"))
    assert "--moe-router-pre-softmax" not in arguments(tiny())


def test_strategies_train_under_tensor_parallelism_without_sequence_parallelism():
    for name in ("ep", "fssdp", "parm"):
        strategy = f"strategy={{name: {name}}}"
        words = arguments(tiny("parallelism.tensor_model_parallel_size=2", *OWN, strategy))
        assert value_of(words, "--tensor-model-parallel-size") == "2"
        assert "--sequence-parallel" not in words


def test_heads_norms_and_positions_become_megatron_arguments():
    words = arguments(
        tiny(
            *("model.num_attention_heads=3", "model.kv_channels=24", "model.qk_layernorm=true"),
            *("model.layernorm_epsilon=1e-6", "model.rotary_base=1000000"),
        )
    )
    assert value_of(words, "--kv-channels") == "24"
    assert value_of(words, "--norm-epsilon") == "1e-06"
    assert value_of(words, "--rotary-base") == "1000000"
    assert "--qk-layernorm" in words
    words = arguments(tiny("model.position_embedding_type=learned_absolute"))
    assert not {"--kv-channels", "--rotary-base", "--qk-layernorm"} & set(words)


def test_missing_or_refused_fusions_are_switched_off():
    plain = Installation(on_cpu=False, has_transformer_engine=False)
    assert {"--no-rope-fusion", "--no-masked-softmax-fusion"} < set(arguments(tiny(), plain))
    full = Installation(on_cpu=False, has_transformer_engine=True)
    assert "--no-rope-fusion" not in arguments(tiny(), full)
    grouped = arguments(tiny("strategy={name: none}", "model.add_bias_linear=true"), full)
    assert {"--moe-grouped-gemm", "--no-bias-dropout-fusion"} < set(grouped)
    assert "--no-bias-dropout-fusion" not in arguments(tiny("strategy={name: none}"), full)


def test_on_gpu_transformer_engine_is_used_when_installed():
    gpu = Installation(on_cpu=False, has_transformer_engine=True)
    words = arguments(tiny("training.bf16=true"), gpu)
    assert value_of(words, "--transformer-impl") == "transformer_engine"
    assert value_of(words, "--distributed-backend") == "nccl"
    assert "--bf16" in words
    assert "--use-cpu-initialization" not in words
    plain = Installation(on_cpu=False, has_transformer_engine=False)
    assert value_of(arguments(tiny(), plain), "--transformer-impl") == "local"


def test_resume_loads_the_runs_own_checkpoints():
    assert value_of(arguments(tiny(), resume=True), "--load") == "runs/x/checkpoints"
    words = arguments(tiny("training.load=elsewhere"))
    assert value_of(words, "--load") == "elsewhere"


def test_every_megatron_argument_can_be_given_and_wins_over_what_is_derived():
    words = arguments(
        tiny(
            *("model.moe_expert_capacity_factor=1.5", "model.moe_token_dispatcher_type=allgather"),
            *("training.bias_dropout_fusion=true", "training.use_cpu_initialization=null"),
        )
    )
    assert value_of(words, "--moe-expert-capacity-factor") == "1.5"
    assert value_of(words, "--moe-token-dispatcher-type") == "allgather"
    assert not {"--no-bias-dropout-fusion", "--use-cpu-initialization"} & set(words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.num_expert=4", "model: unknown key 'num_expert'; did you mean 'num_experts'? wanted"),
        ("model.moe_top_k=4", "did you mean 'moe_router_topk'?"),
        ("parallelism.expert=4", "did you mean 'expert_model_parallel_size'?"),
        ("model.disable_bias_linear=true", "did you mean 'add_bias_linear'?"),
        ("model.moe_expert_capacity_factr=1", "did you mean 'moe_expert_capacity_factor'?"),
        ("training.hidden_size=3", "training: unknown key 'hidden_size'; it belongs under model"),
        ("model.moe_expert_capacity_factor=a", "got 'a' (string), wanted a number"),
        ("model.moe_expert_capacity_factor=true", "got True (boolean), wanted a number"),
        (
            "training.attention_backend=foo",
            "got 'foo' (string), wanted one of flash, fused, unfused, local, auto",
        ),
        ("training.num_workers=1.5", "training.num_workers: got 1.5 (number), wanted a whole number"),
        ("training.moe_grouped_gemm=3", "got 3 (whole number), wanted true or false"),
        ("training.data_path={a: 1}", "training.data_path: got a mapping, wanted a string or a number"),
        ("training.onnx_safe=1", "training.onnx_safe: got 1 (whole number), wanted true or false"),
        ("training.vocab_size=300", "training.vocab_size 300 follows from the section data"),
        ("megatron_args=[a]", "unknown key 'megatron_args'; known: model,"),
    ],
)
def test_keys_that_megatron_lacks_and_values_that_it_refuses_are_named(override, words):
    with pytest.raises(ConfigurationError) as caught:
        tiny(override)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_key_stands_in_one_section():
    with pytest.raises(
        ConfigurationError, match=r"training: unknown key 'num_workers'; it is given under model"
    ):
        tiny("training.num_workers=1", "model.num_workers=1")


def test_the_batch_is_by_default_one_micro_batch_for_each_rank():
    assert tiny("training.global_batch_size=null").global_batch_size == 16
    assert value_of(arguments(tiny("training.global_batch_size=null")), "--global-batch-size") == "16"


def test_without_validation_data_nothing_is_evaluated():
    assert value_of(arguments(tiny("training.eval_iters=5")), "--eval-iters") == "0"
    assert (
        value_of(arguments(tiny("training.eval_iters=5", "training.eval_interval=3")), "--eval-iters") == "5"
    )


def test_a_training_board_is_written_only_where_requested():
    assert "--tensorboard-dir" not in arguments(tiny())
    assert value_of(arguments(tiny("training.tensorboard=true")), "--tensorboard-dir") == "runs/x/tensorboard"
    assert value_of(arguments(tiny("training.tensorboard_dir=boards/y")), "--tensorboard-dir") == "boards/y"


def test_the_profiler_records_the_given_iterations() -> None:
    assert "--profile" not in arguments(tiny())
    asked = ("training.profile=true", "training.profile_step_start=3", "training.profile_step_end=6")
    run = tiny(*asked, "training.profile_ranks=[0,2]")
    found = arguments(run)
    assert {"--profile", "--use-pytorch-profiler"} < set(found)
    assert (value_of(found, "--profile-step-start"), value_of(found, "--profile-step-end")) == ("3", "6")
    ranks = found.index("--profile-ranks")
    assert found[ranks + 1 : ranks + 3] == ["0", "2"]
    # Megatron writes the trace into a folder beside that of the board.
    assert value_of(found, "--tensorboard-dir") == "runs/x/tensorboard"
    assert trace_folder(run.training, Path("runs/x")) == Path("runs/x/torch_profile")
    assert "--profile" not in arguments(run, resume=True)
    board = tiny(*asked, "training.tensorboard_dir=boards/y")
    assert value_of(arguments(board), "--tensorboard-dir") == "boards/y"
    assert trace_folder(board.training, Path("runs/x")) == Path("boards/torch_profile")
    for setting, message in (
        ("training.profile_step_end=3", "profile_step_end 3 is not after training.profile_step_start 3"),
        ("training.profile_step_end=61", "is larger than training.train_iters 60"),
        ("training.profile_ranks=[-1]", r"profile_ranks.0: got -1"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            tiny(*asked, setting)


def test_a_list_of_moe_layers_is_one_argument():
    words = arguments(tiny("model.moe_layer_freq=[0, 1, 0, 1]"))
    assert value_of(words, "--moe-layer-freq") == "[0,1,0,1]"


def test_external_data_is_named_by_megatrons_arguments():
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
