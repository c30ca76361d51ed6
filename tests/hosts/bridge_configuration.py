"""Megatron-Bridge's description of a tiny MoE model and of its training on CPU ranks."""

import os

import torch
import yaml
from megatron.bridge.models.gpt.gpt_builder import GPTModelConfig
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.transformer_config import TransformerConfig
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training import config
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from tests.hosts.tiny_qwen import EXPERTS, HEADS, HIDDEN, TOP

LENGTH, VOCABULARY, MICRO_BATCH = 32, 128, 2
ADAPTERS = {  # What Megatron-Bridge's LoRA is told. By default, attention and experts have adapters.
    "attention": {"target_modules": ["linear_qkv", "linear_proj"]},
    "canonical": {},
    "experts": {},  # Grouped experts of a layer share one, sequential ones have one each.
    "each-expert": {"share_expert_adapters": False},
    "shared-outer": {"experts_shared_outer_loras": True},
}

_LAYERS = {"activation_func": torch.nn.functional.silu} | yaml.safe_load(f"""
    {{hidden_size: {HIDDEN}, num_attention_heads: {HEADS}, ffn_hidden_size: 64, num_moe_experts: {EXPERTS},
    moe_router_topk: {TOP}, moe_ffn_hidden_size: {HIDDEN}, moe_router_load_balancing_type: none,
    moe_token_dispatcher_type: alltoall, gated_linear_unit: true, normalization: RMSNorm,
    add_bias_linear: false, attention_dropout: 0.0, hidden_dropout: 0.0}}""")
_MODEL = yaml.safe_load(f"""
    {{position_embedding_type: rope, seq_length: {LENGTH}, vocab_size: {VOCABULARY},
    share_embeddings_and_output_weights: false}}""")
_ON_CPU = yaml.safe_load("""
    {transformer_impl: local, use_cpu_initialization: true, gradient_accumulation_fusion: false,
    bias_dropout_fusion: false, apply_rope_fusion: false, masked_softmax_fusion: false,
    cross_entropy_loss_fusion: false, persist_layer_norm: false}""")
_SCHEDULE = yaml.safe_load("""
    {lr_decay_style: constant, lr_decay_iters: 100, lr_warmup_iters: 0, start_weight_decay: 0.01,
    end_weight_decay: 0.01, weight_decay_incr_style: constant, override_opt_param_scheduler: true}""")
_DATA = yaml.safe_load("""
    {random_seed: 1234, split: "9,1,0", dataloader_type: single, num_workers: 0,
    num_dataset_builder_threads: 1, reset_attention_mask: false, reset_position_ids: false,
    eod_mask_loss: false, skip_getting_attention_mask_from_dataset: false}""")
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def local_layers(of_model, vp_stage=None):
    """Megatron's layers without Transformer Engine; the provider's own default is with it."""
    return get_gpt_decoder_block_spec(
        of_model, use_transformer_engine=False, normalization=of_model.normalization, vp_stage=vp_stage
    )


def model_of(options):
    """The model, for Megatron-Bridge's ModelBuilder or as a provider."""
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    parallel = {
        "tensor_model_parallel_size": options.tp,
        "sequence_parallel": options.tp > 1,
        "pipeline_model_parallel_size": options.pp,
        "pipeline_dtype": dtype,
        "expert_model_parallel_size": options.ep,
        "expert_tensor_parallel_size": 1,
    }
    sizes = {"num_layers": options.layers, "moe_grouped_gemm": options.grouped}
    numbers = {"params_dtype": dtype, "bf16": options.bf16}
    layers = _LAYERS | _ON_CPU | parallel | sizes | numbers | (_RECOMPUTE if options.recompute else {})
    if options.model_config:
        model = GPTModelConfig(transformer=TransformerConfig(**layers), **_MODEL)
        model.transformer.seq_length = LENGTH  # Megatron-Bridge 0.6.2 warms layers up by it.
        return model
    return GPTModelProvider(**layers, **_MODEL, transformer_layer_spec=local_layers)


def optimizer_of(options):
    rates = {"optimizer": "sgd", "lr": 0.5} if options.sgd else {"optimizer": "adam", "lr": 5e-3}
    return config.OptimizerConfig(
        **rates,
        min_lr=0.0,
        clip_grad=1.0,
        bf16=options.bf16,
        params_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        use_distributed_optimizer=options.distributed_optimizer or options.fsdp,
    )


def data_parallelism_of(options):
    distributes = options.distributed_optimizer or options.fsdp
    return config.DistributedDataParallelConfig(
        use_distributed_optimizer=distributes,
        overlap_grad_reduce=options.overlap,
        overlap_param_gather=options.overlap and distributes,
        grad_reduce_in_fp32=True,
        use_megatron_fsdp=options.fsdp,
        gradient_reduce_div_fusion=False,  # gloo has no reduction that multiplies.
        **({"data_parallel_sharding_strategy": "optim_grads_params"} if options.fsdp else {}),
    )


def checkpoints_of(options):
    return config.CheckpointConfig(
        save=options.save,
        save_interval=options.save_every if options.save else None,
        load=options.load,
        pretrained_checkpoint=options.pretrained,
        ckpt_format="fsdp_dtensor" if options.fsdp else "torch_dist",
    )


def configuration_of(options):
    """Everything that ``pretrain()`` needs to know."""
    num_replicas = int(os.environ["WORLD_SIZE"]) // (options.tp * options.pp)
    batch = MICRO_BATCH * options.micro_batches * num_replicas
    kind = CanonicalLoRA if options.lora == "canonical" else LoRA
    return config.ConfigContainer(
        model=model_of(options),
        peft=kind(dim=4, alpha=8, **ADAPTERS[options.lora]) if options.lora else None,
        train=config.TrainingConfig(
            train_iters=options.steps, global_batch_size=batch, micro_batch_size=MICRO_BATCH
        ),
        validation=config.ValidationConfig(
            eval_interval=options.evaluate_every, eval_iters=2 if options.evaluate_every else 0
        ),
        optimizer=optimizer_of(options),
        scheduler=config.SchedulerConfig(**_SCHEDULE),
        ddp=data_parallelism_of(options),
        dataset=config.MockGPTDatasetConfig(seq_length=LENGTH, **_DATA),
        logger=config.LoggerConfig(log_interval=10**6),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=checkpoints_of(options),
        rng=config.RNGConfig(seed=1234),
        dist=config.DistributedInitConfig(
            distributed_backend="gloo", disable_jit_fuser=True, use_megatron_fsdp=options.fsdp
        ),
    )
