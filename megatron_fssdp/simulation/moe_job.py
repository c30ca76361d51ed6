"""Sizes of a training job on each device, in FLOPs, bytes and elements.

Shape letters: L MoE layers.
"""

from dataclasses import dataclass, field, replace

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.sections import ModelArguments
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.host_seconds import MEASURED, HostCosts
from megatron_fssdp.planning.cost.layer_profile import measured_messages
from megatron_fssdp.planning.cost.link_seconds import cluster_cost
from megatron_fssdp.planning.memory import FP32_BYTES, ExpertOptimizer
from megatron_fssdp.planning.replica_life import HeldReplicas, PipelineStage, ReplicaLife
from megatron_fssdp.planning.transfer.message_size import MessageRule
from megatron_fssdp.simulation.parameter_count import (
    count_parameters,
    dense_matrix_elements,
    expert_elements,
    mlp_matrix_elements,
)

ACTIVATIONS_PER_HIDDEN = 15 / 2
"""Elements that a layer keeps for its backward pass, per element of its hidden states.

The MLP and the attention matrix are not included. These are 11 bytes of attention and 4 bytes of norms in
16-bit precision (Korthikanti et al. 2022, §4.1).
"""


@dataclass(frozen=True)
class MoeJob:
    """Sizes of a training job, for one device. FLOPs are floating-point operations of the forward pass.

    Attributes:
        num_devices: Devices of an expert-parallel group, D.
        num_experts: Routed experts of a layer, E: a multiple of D, or less than D. With fewer experts than
            devices, which Megatron does not support, a device owns experts of some layers only.
        tokens_per_micro_batch: Tokens of a device in a micro-batch.
        token_bytes: Bytes of one token's hidden state.
        expert_elements: Elements of one expert's parameters, each of ``dtype_bytes``.
        expert_flops_per_token: FLOPs of one expert for one token.
        gradient_bytes: Bytes of one element of ``main_grad``.
        before_layer_flops_L: For each MoE layer, FLOPs of a micro-batch between the transformer layer of the
            previous MoE layer and its own: embeddings and dense layers.
        before_gate_flops_L: For each MoE layer, FLOPs of a micro-batch in its own transformer layer up to the
            dispatch: attention, gate and shared experts. spAG is hidden under this compute.
        after_layers_flops: FLOPs of a micro-batch after the last MoE layer: dense layers and logits.
        dense_elements: Elements of the parameters that every device has, without experts, biases and norms.
        expert_data_parallel_size: Number of expert-parallel groups that own the same experts.
        data_parallel_size: Number of ranks that have the same dense parameters.
        reduces_dense_at_end: Whether dense gradients are reduced after the last backward pass.
        activation_bytes: Estimated bytes that a micro-batch keeps for its backward pass, without experts.
        activation_bytes_per_pair: Estimated bytes that experts keep for each (token, k) pair.
        on_cuda: Whether devices are GPUs. Transfers between GPUs use larger messages.
        host: Costs of planning on the host, or ``None`` to leave them out.
        choices: What a record of the loads knows about the experts of the tokens, and whether Megatron's
            dispatcher sends each token once.
    """

    num_devices: int
    num_experts: int
    top_k: int
    tokens_per_micro_batch: float
    num_micro_batches: int
    token_bytes: int
    expert_elements: int
    expert_flops_per_token: float
    dtype_bytes: int
    gradient_bytes: int
    before_layer_flops_L: tuple[float, ...]
    before_gate_flops_L: tuple[float, ...]
    after_layers_flops: float = 0.0
    dense_elements: int = 0
    optimizer: ExpertOptimizer = field(default_factory=ExpertOptimizer)
    expert_data_parallel_size: int = 1
    data_parallel_size: int = 1
    reduces_dense_at_end: bool = False
    activation_bytes: float = 0.0
    activation_bytes_per_pair: float = 0.0
    on_cuda: bool = True
    host: HostCosts | None = None
    choices: TokenChoices | None = None

    @property
    def num_layers(self) -> int:
        """Number of MoE layers, L."""
        return len(self.before_gate_flops_L)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's parameters."""
        return self.expert_elements * self.dtype_bytes

    @property
    def owned_bytes(self) -> int:
        """Bytes that move when one expert changes its owner."""
        return self.optimizer.owned_bytes(
            self.expert_elements, self.dtype_bytes, self.expert_data_parallel_size
        )

    def messages(self, cluster: ClusterDescription) -> MessageRule:
        """How the runtime divides an expert into messages, once it has measured the links of a cluster."""
        return measured_messages(cluster_cost(cluster), on_cuda=self.on_cuda)

    @property
    def pairs_per_device(self) -> float:
        """Number of (token, k) pairs that a device routes in an iteration."""
        return self.tokens_per_micro_batch * self.num_micro_batches * self.top_k

    def held_replicas(self, life: ReplicaLife) -> HeldReplicas:
        """When a device holds replicas: one micro-batch is in flight, without pipelines."""
        return HeldReplicas(life, PipelineStage((self.num_layers,)), self.num_micro_batches)

    def with_tokens(self, factor: float) -> "MoeJob":
        """The job with ``factor`` times as many tokens on every device, in equally long sequences."""
        return replace(
            self,
            tokens_per_micro_batch=self.tokens_per_micro_batch * factor,
            before_layer_flops_L=tuple(flops * factor for flops in self.before_layer_flops_L),
            before_gate_flops_L=tuple(flops * factor for flops in self.before_gate_flops_L),
            after_layers_flops=self.after_layers_flops * factor,
            activation_bytes=self.activation_bytes * factor,
        )


def job_of_run(run: RunConfig) -> MoeJob:
    """The job of a training run's settings.

    FLOPs count matrix products, two operations for each multiply-add, and attention in full although half of
    it is masked, as in Megatron's own throughput figure.

    Raises:
        ConfigurationError: The model has no experts, or uses parallelism or recomputation that is not
            simulated.
    """
    model, cut, training = run.model, run.parallelism, run.training
    if model.num_experts is None:
        raise ConfigurationError("simulate: the model has no experts; set model.num_experts")
    for kind in ("tensor_model", "pipeline_model", "context", "expert_tensor"):
        name = f"{kind}_parallel_size"
        size = getattr(cut, name) or 1
        if size > 1:
            raise ConfigurationError(
                f"simulate: parallelism.{name} is {size}, wanted 1, because only data and expert "
                "parallelism are simulated; describe the part of one stage or shard as a separate model"
            )
    if training.recompute_granularity == "full":
        raise ConfigurationError(
            "simulate: training.recompute_granularity is full, wanted selective or null, because recomputed "
            "layers are not simulated; change it"
        )
    tokens = model.seq_length * training.micro_batch_size
    dtype_bytes = FP32_BYTES if training.precision == "fp32" else 2
    inner_of_pair = (2 if model.is_gated else 1) * 2 * model.expert_ffn_size
    before_layer, before_gate, after_layers = _flops_by_layer(model, run.vocab_size, tokens)
    count = count_parameters(model, run.vocab_size)
    hidden_bytes = tokens * model.hidden_size * dtype_bytes
    return MoeJob(
        num_devices=cut.expert_model_parallel_size,
        num_experts=model.num_experts,
        top_k=model.moe_router_topk,
        tokens_per_micro_batch=tokens,
        num_micro_batches=run.global_batch_size // (training.micro_batch_size * cut.data_parallel_size),
        token_bytes=model.hidden_size * dtype_bytes,
        expert_elements=expert_elements(model),
        expert_flops_per_token=2.0 * mlp_matrix_elements(model, model.expert_ffn_size),
        dtype_bytes=dtype_bytes,
        # Megatron's main_grad is fp32 also in bf16 training.
        gradient_bytes=2 if training.precision == "fp16" else FP32_BYTES,
        before_layer_flops_L=before_layer,
        before_gate_flops_L=before_gate,
        after_layers_flops=after_layers,
        # Layers of multi-token prediction are left out, as in the modelled time.
        dense_elements=count.layer_matrices + count.outside_layers,
        optimizer=ExpertOptimizer(
            num_state_tensors=2 if training.optimizer == "adam" else 1,
            has_master_weights=training.precision != "fp32",
            is_distributed=cut.use_distributed_optimizer,
        ),
        expert_data_parallel_size=cut.world_size // cut.expert_model_parallel_size,
        data_parallel_size=cut.data_parallel_size,
        reduces_dense_at_end=cut.data_parallel_size > 1 and not cut.overlap_grad_reduce,
        activation_bytes=model.num_layers * ACTIVATIONS_PER_HIDDEN * hidden_bytes,
        activation_bytes_per_pair=dtype_bytes * (2 * model.hidden_size + inner_of_pair),
        on_cuda=training.device != "cpu",
        host=MEASURED,
        choices=TokenChoices(
            model.moe_router_topk,
            is_fused=run.megatron_values().get("moe_token_dispatcher_type") == "flex",
        ),
    )


def _flops_by_layer(
    model: ModelArguments, vocab_size: int, tokens: int
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """FLOPs before each MoE layer's transformer layer, in it up to the dispatch, and at the end."""
    hidden, scores_width = model.hidden_size, 2 * model.head_width
    if model.multi_latent_attention:
        scores_width = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
    # Scores and values are computed for all tokens, also for those that a mask or a window removes.
    scores = 2.0 * model.seq_length * model.num_attention_heads * scores_width
    before_layer, before_gate, running = [], [], 0.0
    for is_moe in model.moe_layers:
        flops = scores + 2.0 * dense_matrix_elements(model, is_moe)
        if is_moe:
            before_layer.append(tokens * running)
            before_gate.append(tokens * flops)
            running = 0.0
        else:
            running += flops
    before_logits = 2.0 * hidden * hidden if model.family == "bert" else 0.0
    logits = before_logits + 2.0 * hidden * vocab_size
    return tuple(before_layer), tuple(before_gate), tokens * (running + logits)
