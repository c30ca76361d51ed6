"""Sizes of a training job on each device, in FLOPs, bytes and elements.

Shape letters: L MoE layers.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.parameter_count import (
    count_parameters,
    dense_matrix_elements,
    expert_elements,
    mlp_matrix_elements,
)
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.sections import ModelArguments
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.host_seconds import MEASURED, HostCosts
from megatron_fssdp.planning.cost.layer_profile import measured_messages
from megatron_fssdp.planning.cost.link_seconds import cluster_cost
from megatron_fssdp.planning.memory import FP32_BYTES, ExpertOptimizer, HeldReplicas
from megatron_fssdp.planning.replica_life import PipelineStage, ReplicaLife
from megatron_fssdp.planning.transfer.message_size import MessageRule
from megatron_fssdp.simulation.dense_messages import DenseMessages
from megatron_fssdp.simulation.layout import StageLayers, stages_of

ACTIVATIONS_PER_HIDDEN = 15 / 2
"""Elements that a layer keeps for its backward pass, per element of its hidden states.

The MLP and the attention matrix are not included. These are 11 bytes of attention and 4 bytes of norms in
16-bit precision (Korthikanti et al. 2022, §4.1).
"""


@dataclass(frozen=True)
class MoeJob:
    """Sizes of a training job, for one device. FLOPs are floating-point operations of the forward pass."""

    num_devices: int  # devices of an expert-parallel group, D
    # Routed experts of a layer, E: a multiple of D, or less than D. With fewer experts than devices, which
    # Megatron does not support, a device owns experts of some layers only.
    num_experts: int
    top_k: int
    tokens_per_micro_batch: float  # of a device
    num_micro_batches: int
    token_bytes: int  # one token's hidden state
    expert_elements: int  # one expert's parameters, each of dtype_bytes
    expert_flops_per_token: float  # one expert for one token
    dtype_bytes: int
    gradient_bytes: int  # one element of main_grad
    # FLOPs of a micro-batch before each MoE layer: between the transformer layer of the MoE layer before and
    # its own (embeddings and dense layers), and in its own up to the dispatch (attention, gate and shared
    # experts), under which spAG is hidden. After the last one: dense layers and logits.
    before_layer_flops_L: tuple[float, ...]
    before_gate_flops_L: tuple[float, ...]
    after_layers_flops: float = 0.0
    before_again_flops_L: tuple[float, ...] = ()  # what the backward pass computes of them again; or nothing
    after_again_flops: float = 0.0
    recomputed: frozenset[int] = frozenset()  # MoE layers, from 0, whose transformer layer is recomputed
    recomputed_at_once: int = 1  # layers of which the backward pass keeps only the first one's input
    recomputed_bytes: float = 0.0  # as activation_bytes, of the layers that are recomputed together
    pipeline: PipelineStage | None = None  # the simulated stage; None: one that has all layers
    # Ranks that hold parts of each expert (expert tensor parallelism). They count as one device with the
    # tokens of all; token_bytes, expert elements and FLOPs are the part of one rank.
    num_peers: int = 1
    dense_elements: int = 0  # parameters that every device has, without experts, biases and norms
    optimizer: ExpertOptimizer = field(default_factory=ExpertOptimizer)
    expert_data_parallel_size: int = 1  # expert-parallel groups that own the same experts
    data_parallel_size: int = 1  # ranks that have the same dense parameters
    reduces_at_end: bool = False  # whether gradients are reduced after the last backward pass
    activation_bytes: float = 0.0  # estimate of what a micro-batch keeps for its backward pass, but experts
    activation_bytes_per_pair: float = 0.0  # estimate of what experts keep for each (token, k) pair
    dense: DenseMessages = field(default_factory=DenseMessages)  # of other parallelism
    on_cuda: bool = True  # whether devices are GPUs, whose transfers use larger messages
    host: HostCosts | None = None  # costs of planning on the host; None: left out
    # What a record of the loads knows about the experts of the tokens, and whether Megatron's dispatcher
    # sends each token once.
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
            self.expert_bytes, self.expert_elements, self.expert_data_parallel_size
        )

    def messages(self, cluster: ClusterDescription) -> MessageRule:
        """How the runtime divides an expert into messages, once it has measured the links of a cluster."""
        return measured_messages(cluster_cost(cluster), on_cuda=self.on_cuda)

    @property
    def pairs_per_device(self) -> float:
        """Number of (token, k) pairs that a device routes in an iteration."""
        return self.tokens_per_micro_batch * self.num_micro_batches * self.top_k

    @property
    def stage(self) -> PipelineStage:
        """The simulated pipeline stage."""
        return self.pipeline or PipelineStage((self.num_layers,))

    @property
    def bubble(self) -> float:
        """Idle seconds of the pipeline stage over those of its micro-batches (1F1B, interleaved)."""
        return (self.stage.num_stages - 1) / (self.num_micro_batches * len(self.stage.layers_of_chunk))

    @property
    def micro_batches_in_flight(self) -> float:
        """Most micro-batches whose activations the stage keeps; chunks of layers are parts of one."""
        return self.stage.layers_in_flight(self.num_micro_batches) / self.num_layers

    def kept_pairs(self, pairs_LD: np.ndarray) -> float:
        """(token, k) pairs whose activations the busiest device keeps, from those that it computes."""
        again_L = np.isin(np.arange(self.num_layers), [*self.recomputed])
        kept_D = self.micro_batches_in_flight * np.sum(pairs_LD[~again_L], axis=0)
        most_D = pairs_LD[again_L].max(axis=0, initial=0) * self.recomputed_at_once
        return float((kept_D + most_D).max())

    def held_replicas(self, life: ReplicaLife) -> HeldReplicas:
        """How long, and of which layers of the stage, a device holds replicas."""
        sizes = self.expert_elements, self.dtype_bytes
        return HeldReplicas(life, self.stage, *sizes, self.num_micro_batches)


def job_of_run(run: RunConfig, stage: StageLayers | None = None) -> MoeJob:
    """The job of a training run's settings, or of one of its pipeline stages; by default of all layers.

    FLOPs count matrix products, two operations for each multiply-add, and attention in full although half of
    it is masked, as in Megatron's own throughput figure. Ranks of tensor and context parallelism share the
    tokens, as under sequence parallelism.

    Raises:
        ConfigurationError: The model has no experts, or its layers do not fit the pipeline.
    """
    model, cut, training = run.model, run.parallelism, run.training
    if model.num_experts is None:
        raise ConfigurationError("simulate: the model has no experts; set model.num_experts")
    stage = stage or stages_of(run, as_one=True)[0]
    dense_ranks = cut.tensor_model_parallel_size * cut.context_parallel_size
    peers, expert_ranks = cut.expert_tensor_size, cut.expert_model_parallel_size * cut.expert_tensor_size
    tokens = model.seq_length * training.micro_batch_size / dense_ranks
    dtype_bytes = FP32_BYTES if training.precision == "fp32" else 2
    inner_of_pair = (2 if model.is_gated else 1) * 2 * model.expert_ffn_size
    hidden_bytes = tokens * model.hidden_size * dtype_bytes
    layers, ranks = stage.layers, cut.world_size // cut.pipeline_model_parallel_size
    num_recomputed, at_once = sum(again for _, again in layers), stage.recomputed_at_once
    return MoeJob(
        num_devices=cut.expert_model_parallel_size,
        num_experts=model.num_experts,
        top_k=model.moe_router_topk,
        tokens_per_micro_batch=tokens * peers,
        num_micro_batches=run.global_batch_size // (training.micro_batch_size * cut.data_parallel_size),
        token_bytes=-(-model.hidden_size * dtype_bytes // peers),
        expert_elements=-(-expert_elements(model) // peers),
        expert_flops_per_token=2.0 * mlp_matrix_elements(model, model.expert_ffn_size) / peers,
        dtype_bytes=dtype_bytes,
        # Megatron's main_grad is fp32 also in bf16 training.
        gradient_bytes=2 if training.precision == "fp16" else FP32_BYTES,
        **_flops_by_layer(model, run.vocab_size, tokens, stage),
        recomputed_at_once=at_once,
        recomputed_bytes=ACTIVATIONS_PER_HIDDEN * hidden_bytes * min(at_once, num_recomputed),
        pipeline=stage.pipeline if stage.pipeline.num_stages > 1 else None,
        num_peers=peers,
        # Layers of multi-token prediction are left out, as in the modelled time.
        dense_elements=-(-_dense_elements(model, run.vocab_size, stage) // cut.tensor_model_parallel_size),
        optimizer=ExpertOptimizer(
            num_state_tensors=2 if training.optimizer == "adam" else 1,
            has_master_weights=training.precision != "fp32",
            is_distributed=cut.use_distributed_optimizer,
        ),
        expert_data_parallel_size=ranks // expert_ranks,
        data_parallel_size=ranks // cut.tensor_model_parallel_size,
        reduces_at_end=not cut.overlap_grad_reduce,
        activation_bytes=hidden_bytes
        * (ACTIVATIONS_PER_HIDDEN * (len(layers) - num_recomputed) + -(-num_recomputed // at_once)),
        activation_bytes_per_pair=dtype_bytes * (2 * model.hidden_size + inner_of_pair / peers),
        dense=_dense_messages(run, stage, tokens, dtype_bytes),
        on_cuda=training.device != "cpu",
        host=MEASURED,
        choices=TokenChoices(
            model.moe_router_topk, is_fused=run.megatron_values().get("moe_token_dispatcher_type") == "flex"
        ),
    )


def _dense_elements(model: ModelArguments, vocab_size: int, stage: StageLayers) -> int:
    """Elements of a stage's matrices outside experts: the first has the embedding, the last the output."""
    elements = sum(dense_matrix_elements(model, model.moe_layers[layer]) for layer, _ in stage.layers)
    output = vocab_size * model.hidden_size
    outside = count_parameters(model, vocab_size).outside_layers
    at_end = output if model.untie_embeddings_and_output_weights else 0
    if stage.pipeline.stage == 0:
        elements += outside - at_end
    if stage.is_last:  # Of one matrix for embedding and output, both ends of a pipeline have a copy.
        elements += output if stage.pipeline.num_stages > 1 else at_end
    return elements


def _scores_width(model: ModelArguments) -> int:
    """Elements of a key and a value of one head."""
    if model.multi_latent_attention:
        return model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
    return 2 * model.head_width


def _scores_flops(model: ModelArguments) -> float:
    """FLOPs of a token's scores and values, also of those that a mask or a window removes."""
    return 2.0 * model.seq_length * model.num_attention_heads * _scores_width(model)


def _dense_messages(run: RunConfig, stage: StageLayers, tokens: float, dtype_bytes: int) -> DenseMessages:
    """Messages of a rank with so many tokens of a micro-batch."""
    model, cut = run.model, run.parallelism
    grouped = model.group_query_attention and not model.multi_latent_attention
    key_heads = model.num_query_groups if grouped else model.num_attention_heads
    return DenseMessages(
        tensor_size=cut.tensor_model_parallel_size,
        context_size=cut.context_parallel_size,
        stage_ranks=cut.world_size // cut.pipeline_model_parallel_size,
        num_stages=stage.pipeline.num_stages,
        hidden_bytes=tokens * model.hidden_size * dtype_bytes,
        keys_bytes=tokens * key_heads * _scores_width(model) * dtype_bytes,
        scores_flops=tokens * _scores_flops(model),
        shared_experts=model.moe_shared_expert_intermediate_size is not None,
        dense_layers=_dense_layers(model, stage),
    )


def _dense_layers(model: ModelArguments, stage: StageLayers) -> tuple[tuple[int, int], ...]:
    """Dense layers before each MoE layer of the stage and behind the last, and how many are recomputed."""
    places = [(0, 0)]
    for layer, again in stage.layers:
        number, num_again = places[-1]
        if model.moe_layers[layer]:
            places.append((0, 0))
        else:
            places[-1] = number + 1, num_again + again
    return tuple(places)


def _flops_by_layer(
    model: ModelArguments, vocab_size: int, tokens: float, stage: StageLayers
) -> dict[str, Any]:
    """FLOPs of a micro-batch's forward pass, and what is recomputed, by the fields of :class:`MoeJob`."""
    hidden, scores, (*before, behind) = model.hidden_size, _scores_flops(model), _dense_layers(model, stage)
    dense, gate = (tokens * (scores + 2.0 * dense_matrix_elements(model, is_moe)) for is_moe in (False, True))
    again_L = [again for layer, again in stage.layers if model.moe_layers[layer]]
    logits = 2.0 * hidden * hidden if model.family == "bert" else 0.0
    logits = logits + 2.0 * hidden * vocab_size if stage.is_last else 0.0
    return {
        "before_layer_flops_L": tuple(dense * number for number, _ in before),
        "before_gate_flops_L": (gate,) * len(again_L),
        "before_again_flops_L": tuple(dense * number for _, number in before),
        "recomputed": frozenset(np.flatnonzero(again_L).tolist()),
        "after_layers_flops": dense * behind[0] + tokens * logits,
        "after_again_flops": dense * behind[1],
    }
