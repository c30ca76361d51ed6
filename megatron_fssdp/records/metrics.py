"""What ``metrics.jsonl`` says about an iteration, and ``evaluations.jsonl`` about an evaluation."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field

from megatron_fssdp.config.json_records import Count

# Limits of numbers in a record, which detect damaged records.
_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Difference = Annotated[float, Field(allow_inf_nan=False)]

Loss = Annotated[float, BeforeValidator(lambda loss: math.nan if loss is None else loss)]
"""A loss. NaN, in JSON null, if it was not finite or not known."""


@dataclass(frozen=True)
class PassMetrics:
    """Seconds of the forward or backward passes of an MoE layer in an iteration, means over the ranks.

    Waits for replicas are not included. A recomputed forward pass counts as backward pass.

    Attributes:
        other_s: Before the dispatch: attention, the gate, and shared experts that do not overlap.
        dispatch_s: From the exchange of counts to the sorted rows. The smart schedule's has the combine.
        experts_s: The experts' compute.
        combine_s: From the experts' results to the layer's output, with the wait for the slowest rank.
        experts_slowest_s: The experts' compute on the rank where it takes longest.
    """

    other_s: _Figure
    dispatch_s: _Figure
    experts_s: _Figure
    combine_s: _Figure
    experts_slowest_s: _Figure


@dataclass(frozen=True)
class LayerMetrics:
    """Metrics of one MoE layer in one iteration.

    Attributes:
        layer: Megatron's number of the layer, from 1.
        ep_load_max_over_mean: Max/mean device load that plain expert parallelism would have had.
        load_max_over_mean: Max/mean device load under the placement that was used.
        num_replicas: Number of replicas of all experts, in the micro-batch that has most of them.
        spag_bytes: Bytes that SparseAllGather moved, over all devices.
        sprs_bytes: Bytes that SparseReduceScatter moved, over all devices.
        cross_node_tokens: Number of dispatched tokens whose expert was on another node.
        spag_s: Seconds of SparseAllGather on device 0 of each expert-parallel group, mean over the groups.
        spag_exposed_s: The part of ``spag_s`` in which the device's compute waited for the transfer.
        sprs_s: Seconds of SparseReduceScatter, measured like ``spag_s``.
        sprs_exposed_s: The part of ``sprs_s`` in which the device's compute waited for the transfer.
        load_similarity: Share of the load that is on the same experts as in the iteration recorded before
            (Pro-Prophet's locality). None in the first iteration.
        balance_ratio: Standard deviation of the device loads under plain expert parallelism over the one
            under the placement that was used (Pro-Prophet's RB). None if the latter is 0.
        schedule: Order of the collectives in the last forward pass (Parm's schedules).
        schedule_predicted_s: Modelled seconds of a forward pass's collectives, by compared schedule.
        strategy: Strategy that ``auto`` selected for the layer. None under other strategies.
        forward: Seconds of the parts of the forward passes. None if they were not measured.
        backward: The same of the backward passes.
    """

    layer: Count
    ep_load_max_over_mean: _Figure
    load_max_over_mean: _Figure
    num_replicas: Count
    spag_bytes: Count
    sprs_bytes: Count
    cross_node_tokens: Count
    spag_s: _Figure = 0.0
    spag_exposed_s: _Figure = 0.0
    sprs_s: _Figure = 0.0
    sprs_exposed_s: _Figure = 0.0
    load_similarity: _Figure | None = None
    balance_ratio: _Figure | None = None
    schedule: str | None = None
    schedule_predicted_s: dict[str, _Figure] | None = None
    strategy: str | None = None
    forward: PassMetrics | None = None
    backward: PassMetrics | None = None


@dataclass(frozen=True)
class RunSession:
    """One start of a training. A resumed run has one session for each start.

    Attributes:
        strategy: Name of the strategy.
        iterations: Number of iterations that the run was asked to train, those before its start included.
        ranks: Number of ranks on the host that has the fewest cores per rank.
        cores: Number of cores that these ranks can use. 0 if ranks compute on GPUs.
        devices: Number of ranks of the whole run, each with a device of its own. 0 if it was not recorded.
        device: Name of the GPU of global rank 0. Empty if ranks compute on CPUs.
        precision: Data type of parameters and compute: fp32, bf16 or fp16. Empty if it was not recorded.
    """

    strategy: str
    iterations: Count
    ranks: Count = 0
    cores: Count = 0
    devices: Count = 0
    device: str = ""
    precision: str = ""

    @property
    def shared_cores(self) -> str:
        """Statement such as ``4 ranks share 2 cores``; then, speed says nothing about ranks with own devices.

        It is empty otherwise. A rank with little work lends its core to a busy one, so balance saves no time.
        """
        if not 0 < self.cores < self.ranks:
            return ""
        return f"{self.ranks} ranks share {self.cores} core{'s' if self.cores > 1 else ''}"


@dataclass(frozen=True)
class SeenGain:
    """The last change of strategies, checked with the iterations since.

    Attributes:
        predicted_s: Modelled seconds that the change should save in an iteration.
        before_s: Median seconds of the iterations before the change.
        after_s: Median seconds of the iterations since the change. The loads can also have changed.
        is_slower: Whether iterations clearly take longer, so that the change is taken back.
    """

    predicted_s: _Difference
    before_s: _Figure
    after_s: _Figure
    is_slower: bool


@dataclass(frozen=True)
class SelectionMetrics:
    """One selection of ``auto`` for the layers of a pipeline stage, before an iteration.

    Attributes:
        stage: Number of the pipeline stage, from 0.
        changed: Megatron's numbers of the layers that got another strategy, in order.
        predicted_s: Modelled seconds that these changes save in an iteration.
        iteration_s: Median seconds of the iterations before. None if they were not measured.
        seen: What the change before this selection saved. None if it cannot be compared.
    """

    stage: Count
    changed: tuple[Count, ...]
    predicted_s: _Difference
    iteration_s: _Figure | None = None
    seen: SeenGain | None = None


@dataclass(frozen=True)
class IterationMetrics:
    """Metrics of one training iteration.

    Attributes:
        iteration: Number of the iteration, from 1.
        lm_loss: Language-model loss. NaN if it was not finite or not known.
        grad_norm: Global gradient norm. None if Megatron did not compute it.
        iteration_s: Duration of the iteration in wall-clock seconds.
        tokens_per_s: Tokens of the global batch per second.
        layers: Metrics of the MoE layers, in order.
        resharded_experts: Number of experts whose owner or slot changed before the iteration.
        reshard_bytes: Bytes that the re-shard moved between devices, over all devices.
        reshard_s: Seconds of the re-shard, part of ``iteration_s``, on device 0 of the slowest group.
        passes_s: Seconds of forward and backward passes with the reduction of gradients, part of
            ``iteration_s``, on global rank 0. 0 if it was not recorded.
        rank_peak_bytes: Peak memory of each global rank so far, in bytes. Empty if it was not recorded.
        rank_memory: ``allocated`` by torch on the GPU, or ``resident`` in the host's memory with libraries.
        flops: Floating-point operations over all devices, by Megatron's own formula, which counts those of
            the model and no recomputation. 0 if they were not recorded.
        session: The start of the training, in its first iteration. None in all others.
        selections: What ``auto`` selected before the iteration, for each pipeline stage that reconsidered.
    """

    iteration: Count
    lm_loss: Loss
    grad_norm: _Figure | None
    iteration_s: _Figure
    tokens_per_s: _Figure
    layers: tuple[LayerMetrics, ...] = ()
    resharded_experts: Count = 0
    reshard_bytes: Count = 0
    reshard_s: _Figure = 0.0
    passes_s: _Figure = 0.0
    rank_peak_bytes: tuple[Count, ...] = ()
    rank_memory: str | None = None
    flops: _Figure = 0.0
    session: RunSession | None = None
    selections: tuple[SelectionMetrics, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        iteration: Number of iterations for which the model had been trained.
        data: The evaluated data: ``validation`` or ``test``, with the name of the set if there are several.
        losses: Mean of each loss by Megatron's name for it, such as ``lm loss``.
    """

    iteration: Count
    data: str
    losses: dict[str, Loss]

    @property
    def loss(self) -> float:
        """The first loss, which is the language model's."""
        return next(iter(self.losses.values()), math.nan)
