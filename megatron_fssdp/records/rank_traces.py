"""Reads what Megatron itself writes about routing: lines of JSON, in a file for each rank.

Router traces (``--moe-routing-trace-path``) have the experts of every token of a rank. Tokens per expert
(``--save-tokens-per-expert-interval``) count what a rank's own experts got from all ranks.

No line says to which pipeline stage its rank belongs, and each stage numbers its layers from 0. In Megatron's
default order of ranks, those of a stage follow each other, and all of them have its layers. So the layers of
all ranks together are those of the model, once for each rank of a stage. Virtual stages look like stages.
Nor does a line say whether its pass is recomputed: where every line has an equal one, both are one pass.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files.json_records import Count, parse_record
from megatron_fssdp.records.loads import RecordedLoads

ROUTER_TRACES = "router_trace_rank*.jsonl"
TOKENS_PER_EXPERT = "tokens_per_expert/rank*.jsonl"  # in the folder of --save

_Counts = NDArray[np.int64]


class RoutedModel(NamedTuple):
    """Sizes of the model whose routing was recorded."""

    num_layers: int  # MoE layers, without those of multi-token prediction
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class _Routed:
    """A line of a router trace: one layer in one forward pass."""

    step: Count  # from 0
    block: Literal["decoder", "mtp"]
    layer: Count
    rank: Count
    num_tokens: Count
    topk: Count
    top_indices: list[list[int]]

    def counts_E(self, model: RoutedModel, rank: int) -> tuple[int, int, _Counts, int | None]:
        """Return the number of the iteration, that of passes, the tokens of each expert, and a hash."""
        if (self.rank, self.topk) != (rank, model.top_k):
            wanted = f"top-{model.top_k} on rank {rank}"
            raise ValueError(f"got top-{self.topk} on rank {self.rank}, wanted {wanted}")
        chosen = np.array(self.top_indices, np.int64).reshape(self.num_tokens, self.topk).ravel()
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < model.num_experts:
            span = f"{chosen.min()} to {chosen.max()}"
            raise ValueError(f"got experts {span}, wanted 0 to {model.num_experts - 1} as in the model")
        counts_E = np.bincount(chosen, minlength=model.num_experts)
        return self.step + 1, 1, counts_E, hash(chosen.tobytes())


@dataclass(frozen=True)
class _Arrived:
    """A line of tokens per expert: one layer in all forward passes of an iteration."""

    iter: Count  # from 1
    block: Literal["decoder", "mtp"]
    layer: Count
    tpe: list[list[Count]]

    def counts_E(self, model: RoutedModel, rank: int) -> tuple[int, int, _Counts, int | None]:
        """Return the number of the iteration, that of passes, and the tokens of the rank's experts."""
        counts_E = np.array(self.tpe, np.int64).sum(axis=0)
        if counts_E.ndim != 1 or not counts_E.size or model.num_experts % counts_E.size:
            wanted = f"an equal part of the model's {model.num_experts}"
            raise ValueError(f"got {counts_E.size} experts of a rank, wanted {wanted}")
        return self.iter, len(self.tpe), counts_E, None


@dataclass(frozen=True)
class _Rank:
    """The counts of one rank by iteration and layer, and of how many passes they are."""

    path: Path
    counts_E: dict[tuple[int, int], _Counts] = field(default_factory=dict)
    passes: Counter[tuple[int, int]] = field(default_factory=Counter)
    unpaired: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # hashes of lines

    def count_pairs_once(self) -> bool:
        """Count recomputed passes with the passes that they repeat, and return whether there are any."""
        recomputed = [key for key, hashes in self.unpaired.items() if not hashes]
        for key in recomputed:
            self.counts_E[key] = self.counts_E[key] // 2
            self.passes[key] //= 2
        return bool(recomputed)

    @cached_property
    def layers(self) -> list[int]:
        """The layers with counts, once all lines are read."""
        return sorted({layer for _, layer in self.passes})


def read_rank_traces(
    folder: Path, pattern: str, model: RoutedModel, most: int | None
) -> tuple[RecordedLoads, str]:
    """Read the files of all ranks, only the first ``most`` iterations if given; and say how they were read.

    The ranks of a stage are the source devices of :data:`ROUTER_TRACES`. Other files have tokens per expert,
    and one device stands for all. Lines are not kept, only counts.

    Raises:
        ConfigurationError: A line is damaged or of another model, and its number; or the files are not those
            of one run, or of a run that dropped tokens.
    """
    kind = _Routed if pattern == ROUTER_TRACES else _Arrived
    paths = {int(re.sub(r"\D", "", path.name)): path for path in folder.glob(pattern)}
    if missing := sorted({*range(min(paths), max(paths))} - {*paths}):
        raise _refused(
            folder, f"no file of rank {missing[0]}, but of rank {max(paths)}", "those of all ranks"
        )
    read = [_read(path, rank, kind, model, most) for rank, path in sorted(paths.items())]
    ranks = [rank for rank in read if rank.passes]  # a stage without MoE layers has empty files
    num_recomputed = sum(rank.count_pairs_once() for rank in ranks)
    if not ranks:
        raise _refused(folder, "no line of an MoE layer in a decoder", "a run with such layers")
    numbers, iterations = _iterations(ranks)
    if kind is _Routed and numbers[-1] - numbers[0] >= len(numbers):
        raise _refused(folder, f"{len(numbers)} of iterations {numbers[0]} to {numbers[-1]}", "all of them")
    stages = _stages(folder, ranks, model)
    counts = [
        np.array([[[rank.counts_E[i, n] for rank in stage] for n in stage[0].layers] for i in iterations])
        for stage in stages
    ]
    if kind is _Arrived:
        counts = [_of_all_experts(folder, counts_ILDE, model) for counts_ILDE in counts]
    counts_ILDE = np.concatenate(counts, axis=1)
    last = int(counts_ILDE.any(axis=(0, 1, 2)).nonzero()[0].max(initial=-1))
    if last < model.num_experts - 1:
        raise _refused(folder, f"no token of an expert after {last}", f"{model.num_experts} experts")
    note = f"of {len(ranks)} ranks, pipeline stages: {len(stages)}, devices of each: {len(stages[0])}"
    if num_recomputed:
        note += "; every pass is there twice, as recomputation writes it, and is counted once"
    if len(iterations) < len(numbers):
        note += f"; left out: {len(numbers) - len(iterations)} iterations with more or fewer passes than most"
    if iterations[-1] - iterations[0] >= len(iterations):
        note += "; not every iteration, so the last loads that strategies know are older than in a training"
    layers = np.arange(1, model.num_layers + 1)
    return RecordedLoads(counts_ILDE.astype(np.int32), np.array(iterations), layers), note


def _read(
    path: Path, rank: int, kind: type[_Routed | _Arrived], model: RoutedModel, most: int | None
) -> _Rank:
    trace, seen = _Rank(path), [0]
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = parse_record(kind, line)
                iteration, passes, counts_E, line_hash = record.counts_E(model, rank)
                key, is_counted = (iteration, record.layer), record.block == "decoder"
                is_second = is_counted and kind is _Arrived and key in trace.passes
                if iteration < seen[-1] or is_second:
                    raise ValueError(f"got iteration {iteration} after {seen[-1]}, wanted one run in a file")
            except (ValueError, OverflowError) as error:
                raise ConfigurationError(
                    f"{path}: line {number}: {error}; trace again, or read fewer iterations"
                ) from None
            if iteration > seen[-1]:
                seen.append(iteration)
                if most is not None and len(seen) > most + 1:
                    break
            if is_counted:
                trace.counts_E[key] = trace.counts_E.get(key, 0) + counts_E
                trace.passes[key] += passes
                if line_hash is not None:
                    trace.unpaired.setdefault(key, set()).symmetric_difference_update({line_hash})
    return trace


def _iterations(ranks: Sequence[_Rank]) -> tuple[list[int], list[int]]:
    """Return all iterations, and those with as many passes as most; others have evaluations' passes, too."""
    numbers, passes = sorted({number for rank in ranks for number, _ in rank.passes}), dict[int, int]()
    for rank in ranks:
        for number in numbers:
            num_passes = {rank.passes[number, layer] for layer in rank.layers}
            if num_passes != {passes.setdefault(number, max(num_passes))}:
                words = f"{' and '.join(map(str, sorted(num_passes)))} passes of layers in iteration {number}"
                raise ConfigurationError(
                    f"{rank.path}: got {words}, wanted {passes[number]}; lines vanish if tokens are "
                    "dropped or padded, or if a rank is killed: trace again, or read fewer iterations"
                )
    usual = Counter(passes.values()).most_common(1)[0][0]
    return numbers, [number for number in numbers if passes[number] == usual]


def _stages(folder: Path, ranks: list[_Rank], model: RoutedModel) -> list[list[_Rank]]:
    """Divide ranks into pipeline stages, which have all layers of the model together."""
    num_stages, rest = divmod(model.num_layers * len(ranks), sum(len(rank.layers) for rank in ranks))
    if not rest and num_stages and len(ranks) % num_stages == 0:
        size = len(ranks) // num_stages
        stages = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        if all(rank.layers == stage[0].layers for stage in stages for rank in stage):
            return stages
    layers = ", ".join(str(len(rank.layers)) for rank in ranks)
    wanted = f"a model's {model.num_layers} on equally many ranks for each pipeline stage"
    raise _refused(folder, f"{layers} MoE layers on its ranks", wanted)


def _of_all_experts(folder: Path, counts_ILDE: _Counts, model: RoutedModel) -> _Counts:
    """Put the experts of a stage's devices side by side, ``[I, L, 1, E]``, and add copies of them."""
    num_devices = counts_ILDE.shape[2]
    group = model.num_experts // counts_ILDE.shape[3]
    if num_devices % group:
        raise _refused(folder, f"{num_devices} ranks in a stage", f"a multiple of {group} ranks")
    if group > 1 and np.array_equal(counts_ILDE[:, :, 0], counts_ILDE[:, :, 1]):
        raise _refused(folder, "equal counts on two ranks", "a run without expert tensor parallelism")
    return counts_ILDE.reshape(*counts_ILDE.shape[:2], -1, model.num_experts).sum(axis=2, keepdims=True)


def _refused(folder: Path, got: str, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"{folder}: got {got}, wanted {wanted}; give the files and the model of one run"
    )
