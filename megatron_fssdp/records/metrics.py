"""What ``metrics.jsonl`` says about an iteration, and ``evaluations.jsonl`` about an evaluation."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, Field

from megatron_fssdp.files.json_records import Count

# Limits of numbers in a record, which detect damaged records.
_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Difference = Annotated[float, Field(allow_inf_nan=False)]

Loss = Annotated[float, BeforeValidator(lambda loss: math.nan if loss is None else loss)]
"""A loss. NaN, in JSON null, if it was not finite or not known."""


@dataclass(frozen=True)
class PassMetrics:
    """Seconds of the forward or backward passes of an MoE layer in an iteration, means over the ranks.

    Waits for replicas are not included. A recomputed forward pass counts as backward pass.
    """

    other_s: _Figure  # before the dispatch: attention, the gate, and shared experts that do not overlap
    dispatch_s: _Figure  # from the exchange of counts to sorted rows; the smart schedule's has the combine
    experts_s: _Figure  # the experts' compute
    combine_s: _Figure  # from the experts' results to the layer's output, with the wait for the slowest rank
    experts_slowest_s: _Figure  # the experts' compute on the rank where it takes longest


@dataclass(frozen=True)
class LayerMetrics:
    """Metrics of one MoE layer in one iteration."""

    layer: Count  # Megatron's number of the layer, from 1
    ep_load_max_over_mean: _Figure  # max/mean device load that plain expert parallelism would have had
    load_max_over_mean: _Figure  # max/mean device load under the placement that was used
    num_replicas: Count  # of all experts, in the micro-batch that has most of them
    spag_bytes: Count  # that SparseAllGather moved, over all devices
    sprs_bytes: Count  # that SparseReduceScatter moved, over all devices
    cross_node_tokens: Count  # dispatched tokens whose expert was on another node
    # Transfers on device 0 of each expert-parallel group, means over the groups; exposed: compute waited.
    spag_s: _Figure = 0.0
    spag_exposed_s: _Figure = 0.0
    sprs_s: _Figure = 0.0
    sprs_exposed_s: _Figure = 0.0
    # Share of the load on the same experts as one iteration before (Pro-Prophet's locality). None at first.
    load_similarity: _Figure | None = None
    # Standard deviation of device loads under plain expert parallelism over that under the placement used
    # (Pro-Prophet's RB). None if the latter is 0.
    balance_ratio: _Figure | None = None
    schedule: str | None = None  # order of the collectives in the last forward pass (Parm's schedules)
    schedule_predicted_s: dict[str, _Figure] | None = None  # of a forward pass, by compared schedule
    strategy: str | None = None  # that ``auto`` selected for the layer; None under other strategies
    forward: PassMetrics | None = None  # None if the parts of the passes were not measured
    backward: PassMetrics | None = None


@dataclass(frozen=True)
class RunSession:
    """One start of a training."""

    strategy: str
    iterations: Count  # that the run was asked to train, those before its start included
    ranks: Count = 0  # on the host that has the fewest cores per rank
    cores: Count = 0  # that these ranks can use; 0 if ranks compute on GPUs
    devices: Count = 0  # ranks of the whole run, each with a device of its own; 0: not recorded
    device: str = ""  # name of the GPU of global rank 0; empty if ranks compute on CPUs
    precision: str = ""  # data type of parameters and compute: fp32, bf16 or fp16; empty if not recorded

    @property
    def shared_cores(self) -> str:
        """Statement such as ``4 ranks share 2 cores``, or nothing.

        Ranks with little work then lend their cores to busy ones, so balance saves no time.
        """
        if not 0 < self.cores < self.ranks:
            return ""
        return f"{self.ranks} ranks share {self.cores} core{'s' if self.cores > 1 else ''}"


@dataclass(frozen=True)
class SeenGain:
    """The last change of strategies, checked with the iterations since."""

    predicted_s: _Difference  # modelled seconds that the change should save in an iteration
    before_s: _Figure  # median seconds of the iterations before the change
    after_s: _Figure  # and of those since the change; the loads can also have changed
    is_slower: bool  # iterations clearly take longer, so that the change is taken back


@dataclass(frozen=True)
class SelectionMetrics:
    """One selection of ``auto`` for the layers of a pipeline stage, before an iteration."""

    stage: Count  # from 0
    changed: tuple[Count, ...]  # Megatron's numbers of the layers that got another strategy, in order
    predicted_s: _Difference  # modelled seconds that these changes save in an iteration
    iteration_s: _Figure | None = None  # median of the iterations before; None if they were not measured
    seen: SeenGain | None = None  # what the change before this selection saved; None: not comparable


@dataclass(frozen=True)
class IterationMetrics:
    """Metrics of one training iteration."""

    iteration: Count  # from 1
    lm_loss: Loss
    grad_norm: _Figure | None  # global; None if Megatron did not compute it
    iteration_s: _Figure  # wall-clock time
    tokens_per_s: _Figure  # of the global batch
    layers: tuple[LayerMetrics, ...] = ()  # of the MoE layers, in order
    resharded_experts: Count = 0  # experts whose owner or slot changed before the iteration
    reshard_bytes: Count = 0  # that the re-shard moved between devices, over all devices
    reshard_s: _Figure = 0.0  # part of ``iteration_s``, on device 0 of the slowest group
    passes_s: _Figure = 0.0  # part of it in passes and reduction of gradients, on rank 0; 0: not recorded
    rank_peak_bytes: tuple[Count, ...] = ()  # peak memory of each global rank so far; empty: not recorded
    rank_memory: str | None = None  # ``allocated`` by torch on the GPU, or ``resident`` in the host's memory
    flops: _Figure = 0.0  # of all devices without recomputation, by Megatron's formula; 0: not recorded
    session: RunSession | None = None  # the start of the training, in its first iteration; else None
    selections: tuple[SelectionMetrics, ...] = ()  # of ``auto`` before the iteration, one for each stage


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation."""

    iteration: Count  # number of iterations for which the model had been trained
    data: str  # ``validation`` or ``test``, with the name of the set if there are several
    losses: dict[str, Loss]  # means, by Megatron's name for them, such as ``lm loss``

    @property
    def loss(self) -> float:
        """The first loss, which is the language model's."""
        return next(iter(self.losses.values()), math.nan)


def balance_ratio(before_D: np.ndarray, after_D: np.ndarray) -> float | None:
    """Ratio RB of Pro-Prophet (§VI): spread of device loads ``[D]`` before over after balancing.

    The spread is the standard deviation. ``None`` means exactly even after, 1 even before and after.
    """
    before, after = float(np.std(before_D)), float(np.std(after_D))
    if after == 0.0:
        return 1.0 if before == 0.0 else None
    return before / after
