"""Megatron takes the arguments of every shipped model and builds models with the parameters that are counted.

They are built on a meta device at full width; those of more than four layers are cut to two, and 16 experts.
"""

import shlex
import sys

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import core_transformer_config_from_args, gpt_config_from_args
from megatron.training.arguments import parse_args, validate_args
from megatron.training.models.gpt import GPTModelBuilder

from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.parameter_count import count_parameters
from megatron_fssdp.megatron_adapter.entry.argument_check import add_strategy_arguments, requested_by
from megatron_fssdp.pretraining import pretrain_bert
from tests.support.python_process import ROOT
from tests.support.training_preload import on_ranks

from ...launch.tiny_run import arguments_of

CONFIGS = ROOT / "configs"
MODELS = sorted((CONFIGS / "models").glob("*.yaml"))

DENSE = "model.num_experts=null parallelism.expert_model_parallel_size=1 'strategy={name: none}'"
UNTIED = "model.untie_embeddings_and_output_weights=true"
# Features that no shipped model has, as overrides of the tiny models.
OVERRIDES = {
    "bert_moe_tiny": ("", f"model.bert_binary_head=false {UNTIED}", DENSE),
    "gpt_moe_tiny": (
        DENSE,
        # Biases of gated experts behind a dense layer.
        "model.add_bias_linear=true model.quick_geglu=true model.moe_layer_freq=[0,1,1,1]",
        "model.qk_layernorm=true model.kv_channels=24",
        f"model.position_embedding_type=none {UNTIED}",
        # Latent attention without latent queries, and two layers of later tokens.
        "model.multi_latent_attention=true model.kv_lora_rank=512 model.qk_head_dim=24 "
        "model.mtp_num_layers=2",
        # Sinks, biases and a dense layer of later tokens.
        "model.softmax_type=learnable model.window_size=[7,0] model.window_attn_skip_freq=2 "
        "model.add_bias_linear=true model.mtp_num_layers=1 model.moe_layer_freq=[1,1,1,0] "
        "model.normalization=LayerNorm",
    ),
}


def shallow(path):
    is_tiny = path.stem.startswith("tiny-")
    parts = ("parallelism/cpu", "training/tiny") if is_tiny else ("parallelism/h200", "training/measure")
    files = [path, *parts, "strategies/fssdp"]
    model = load_run(files).model
    if model.num_layers <= 4:
        return load_run(files)
    frequency = [] if isinstance(model.moe_layer_freq, int) else ["model.moe_layer_freq=[0, 1]"]
    experts = ["model.num_experts=16"] if (model.num_experts or 0) > 16 else []
    return load_run(files, ["model.num_layers=2", *frequency, *experts])


@on_ranks(1)
def test_counted_parameters_equal_those_that_megatron_builds():
    runs = {path.stem: shallow(path) for path in MODELS}
    for file, overrides in OVERRIDES.items():
        path = CONFIGS / f"{file}.yaml"
        runs |= {f"{file} {words}": load_run([path], shlex.split(words)) for words in overrides}
    counted = {name: count_parameters(run.model, run.data.vocab_size).total for name, run in runs.items()}
    assert {name: built_elements(run) for name, run in runs.items()} == counted


def built_elements(run):
    sys.argv = [f"pretrain_{run.model.family}.py", *arguments_of(run)]
    args = parse_args(add_strategy_arguments)
    args.world_size = run.parallelism.world_size
    validate_args(args)
    assert requested_by(args).name == run.strategy.name

    config = core_transformer_config_from_args(args)
    # One rank holds the whole model.
    config.tensor_model_parallel_size = config.expert_model_parallel_size = 1
    config.expert_tensor_parallel_size = 1
    config.sequence_parallel = config.perform_initialization = False
    config.use_cpu_initialization = True
    with torch.device("meta"):
        model = (_bert if run.model.family == "bert" else _gpt)(config, args, run.data.vocab_size)
    # Megatron allocates attention sinks on an explicit device.
    large = [p for name, p in model.named_parameters() if not name.endswith("softmax_offset")]
    assert {parameter.device.type for parameter in large} == {"meta"}
    return sum(parameter.numel() for parameter in model.parameters())


def _gpt(config, args, vocab_size):
    args.padded_vocab_size, config.transformer_impl = vocab_size, "local"
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GPTModelBuilder(gpt_config_from_args(args, config)).build_model(groups)


def _bert(config, args, vocab_size):
    args.padded_vocab_size = vocab_size  # without Megatron's padding
    pretrain_bert.get_args = lambda: args
    return pretrain_bert.build_model(config=config)
