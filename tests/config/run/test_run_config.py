from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.megatron_arguments import Installation, megatron_arguments
from megatron_fssdp.config.run.megatron_options import options, plain, problem
from megatron_fssdp.config.run.run_config import SECTIONS
from megatron_fssdp.config.run.sections import DataSettings

from ...launch.tiny_run import arguments_of

TP2 = "parallelism.tensor_model_parallel_size=2 parallelism.expert_tensor_parallel_size=1"
NONE = "strategy.name=none"
CPU, GPU, PLAIN_GPU = Installation(True, False), Installation(False, True), Installation(False, False)


def tiny(*overrides):
    return load_run(["gpt_moe_tiny"], overrides)


def given(words):
    """The word that follows each flag; no flag is given twice but --moe-strategy-set."""
    flags = [word for word in words if word.startswith("--") and word != "--moe-strategy-set"]
    assert len(flags) == len(set(flags))
    return dict(zip(words, [*words[1:], ""], strict=True))


def test_declared_keys_are_the_packages_own_or_megatrons_arguments_with_its_defaults():
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            if field.description:  # the package's own
                assert name not in options()
                continue
            assert name in options(), f"{section}.{name}"
            if field.is_required():
                continue
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            assert problem(name, default) == ""
            if default is not None and name not in ("lr", "micro_batch_size"):
                assert plain(options()[name].default) == plain(default), f"{section}.{name}"
    assert all(field.description for field in DataSettings.model_fields.values())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("model.num_experts=6", "expert_model_parallel_size 4 does not divide model.num_experts 6"),
        ("model.num_experts=null", "needs an MoE model"),
        ("model.moe_router_topk=9", "model.moe_router_topk 9 is larger than model.num_experts 8"),
        ("model.num_attention_heads=3", "does not divide model.hidden_size 64"),
        ("model.group_query_attention=true model.num_query_groups=3", "does not divide model.num_attention_"),
        ("model.num_query_groups=2", "no effect without model.group_query_attention"),
        ("model.kv_channels=8 model.multi_latent_attention=true", "ignores model.kv_channels 8"),
        ("model.moe_router_num_groups=2", "only one of moe_router_num_groups and moe_router_group_topk"),
        ("model.moe_layer_freq=[0,1]", "lists 2 layers, wanted model.num_layers 4"),
        ("model.moe_shared_expert_intermediate_size=64 model.add_bias_linear=true", "no biases in shared"),
        ("model.moe_aux_loss_coeff=0.1", "no effect with model.moe_router_load_balancing_type none"),
        ("parallelism.nproc_per_node=6", "does not divide the 6 ranks"),
        (f"{TP2} {NONE}", "sequence_parallel: true"),
        ("training.global_batch_size=24", "every rank processes whole micro-batches"),
        ("training.lr_warmup_iters=60", "must be smaller than"),
        ("training.profile=true training.profile_step_end=61", "is not between"),
        ("data.tokenizer=wordpiece", "set data.tokenizer to bpe"),
        ("training.vocab_size=300", "training.vocab_size 300 follows from the section data"),
        ("data.vocab_size=10", "data.vocab_size: got 10, wanted greater than or equal to 257"),
        # arguments that only Megatron's parser knows
        ("model.num_expert=4", "model: unknown key 'num_expert'; did you mean 'num_experts'? wanted"),
        ("model.moe_top_k=4", "did you mean 'moe_router_topk'?"),
        ("training.hidden_size=3", "training: unknown key 'hidden_size'; it is under model"),
        ("model.num_workers=1 training.num_workers=1", "unknown key 'num_workers'; it is under model"),
        ("model.moe_expert_capacity_factor=true", "capacity_factor: invalid float value: 'True'"),
        ("training.attention_backend=foo", "training.attention_backend: invalid choice: 'foo'"),
        ("training.num_workers=1.5", "training.num_workers: invalid int value: '1.5'"),
        ("training.moe_grouped_gemm=3", "got 3, wanted true or false"),
        ("training.data_path={}", "training.data_path: got {}, wanted a string or a number"),
        ("megatron_args=[a]", "unknown key 'megatron_args'; known: model,"),
    ],
)
def test_mistakes_are_refused_with_their_option_and_the_reason(overrides, words):
    with pytest.raises(ConfigurationError) as caught:
        tiny(*overrides.split())
    message = str(caught.value)
    assert f"--set {overrides.split()[-1]}: " in message
    assert words in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "machine", "wanted", "absent"),
    [
        (
            "",
            CPU,
            "--expert-model-parallel-size=4 --moe-token-dispatcher-type=alltoall --distributed-backend=gloo "
            "--vocab-size=2048 --null-tokenizer-eod-id=2047 --save=runs/x/checkpoints --moe-strategy=fssdp "
            "--eval-iters=0 --split=1,0,0",
            "--load --sequence-parallel --moe-router-pre-softmax --tensorboard-dir --profile "
            "--dist-ckpt-optim-fully-reshardable --kv-channels",
        ),
        (TP2, CPU, "--tensor-model-parallel-size=2", "--sequence-parallel"),
        ("model.moe_router_topk=1", CPU, "--moe-router-pre-softmax", ""),
        # Re-sharding is on by default and refuses Megatron's default format.
        ("parallelism.use_distributed_optimizer=true", CPU, "--dist-ckpt-optim-fully-reshardable", ""),
        ("model.kv_channels=24", CPU, "--kv-channels=24", ""),
        ("model.layernorm_epsilon=1e-6", CPU, "--norm-epsilon=1e-06", ""),
        ("model.moe_layer_freq=[0,1,0,1]", CPU, "--moe-layer-freq=[0,1,0,1]", ""),
        ("training.bf16=true", GPU, "--bf16 --distributed-backend=nccl", "--use-cpu-initialization"),
        ("", GPU, "--transformer-impl=transformer_engine", "--no-rope-fusion"),
        ("", PLAIN_GPU, "--transformer-impl=local --no-rope-fusion --no-masked-softmax-fusion", ""),
        ("model.add_bias_linear=true", GPU, "--moe-grouped-gemm --no-bias-dropout-fusion", ""),
        (NONE, GPU, "--moe-grouped-gemm", "--no-gradient-accumulation-fusion"),
        ("", Installation(False, True, has_apex=False), "--no-gradient-accumulation-fusion", ""),
        # What is given wins over what is derived, and null removes it.
        ("model.moe_token_dispatcher_type=allgather", CPU, "--moe-token-dispatcher-type=allgather", ""),
        ("training.bias_dropout_fusion=true", CPU, "", "--no-bias-dropout-fusion"),
        ("training.use_cpu_initialization=null", CPU, "", "--use-cpu-initialization"),
        ("training.eval_iters=5 training.eval_interval=3", CPU, "--eval-iters=5 --split=95,5,0", ""),
        ("training.tensorboard=true", CPU, "--tensorboard-dir=runs/x/tensorboard", ""),
    ],
)
def test_settings_become_megatrons_arguments(overrides, machine, wanted, absent):
    words = arguments_of(tiny(*overrides.split()), machine)
    flags = given(words)
    for flag in wanted.split():
        name, _, value = flag.partition("=")
        assert name in flags
        assert not value or flags[name] == value
    assert not set(absent.split()) & set(words)


def test_a_strategys_settings_are_yaml_values_with_the_folder_and_the_declared_nodes():
    words = arguments_of(tiny("strategy.settings.rematerialize=true"))
    settings = {words[i + 1] for i, word in enumerate(words) if word == "--moe-strategy-set"}
    wanted = {"record_dir=runs/x", "nodes=2", "slots=2", "overlap_degree=8", "rematerialize=true"}
    assert settings == wanted
    assert not any(word.startswith("nodes=") for word in arguments_of(tiny(NONE)))
    assert "record_dir=runs/x" in arguments_of(tiny("strategy.settings.record_dir=runs/x"))
    with pytest.raises(ConfigurationError, match=r"^strategy\.settings\.record_dir: got elsewhere"):
        arguments_of(tiny("strategy.settings.record_dir=elsewhere"))


def test_a_resumed_run_loads_its_own_checkpoints_and_records_no_profile():
    asked = ("training.profile=true", "training.profile_step_start=3", "training.profile_step_end=6")
    run = tiny(*asked, "training.profile_ranks=[0,2]")
    words = arguments_of(run)
    flags = given(words)
    assert {"--profile", "--use-pytorch-profiler"} < set(words)
    assert (flags["--profile-step-start"], flags["--profile-step-end"]) == ("3", "6")
    assert words[words.index("--profile-ranks") + 1 :][:2] == ["0", "2"]
    # Megatron writes the trace into a folder beside that of the board.
    assert flags["--tensorboard-dir"] == "runs/x/tensorboard"
    resumed = arguments_of(run, resume=True)
    assert "--profile" not in resumed
    assert given(resumed)["--load"] == "runs/x/checkpoints"
    board = tiny(*asked, "training.tensorboard_dir=boards/y")
    assert given(arguments_of(board))["--tensorboard-dir"] == "boards/y"


def test_external_data_is_named_by_megatrons_arguments():
    words = megatron_arguments(tiny("data.external=true"), {}, CPU, Path("runs/x"), resume=False)
    assert not {"--data-path", "--tokenizer-type"} & set(words)


@pytest.mark.parametrize(
    ("split", "name"), [("969,30,1", "test"), ("0,1", "training"), ("75,2,23", "validation")]
)
def test_data_splits_without_documents_are_refused(split, name):
    """Megatron would search an empty split for tokens forever."""
    with pytest.raises(ConfigurationError, match=f"none of the 50 documents for the {name} data"):
        arguments_of(tiny("training.eval_interval=10", f"data.split='{split}'"))
