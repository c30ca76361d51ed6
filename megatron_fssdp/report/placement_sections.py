"""Sections of runs' pages: loads between micro-batches, and replicas of experts with ``auto``'s choices.

Shape letters: I iterations, Z micro-batches, L MoE layers, D devices, E experts.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_fssdp.report import figures
from megatron_fssdp.report.load_changes import LOAD_CHANGES, load_changes
from megatron_fssdp.report.load_sections import NO_LAYERS
from megatron_fssdp.report.measures import ShownRun, counted
from megatron_fssdp.report.page import Part, Section, Table

_MOST_SEARCHED = 400  # micro-batches for which replicas are planned


def micro_batch_sections(runs: Sequence[ShownRun]) -> list[Section]:
    """Show how loads differ between micro-batches, if runs have recorded them."""
    rows: list[tuple[str, ...]] = []
    for shown in runs:
        loads, placed = shown.run.micro_batch_loads, shown.run.placements
        if loads is None or placed is None:
            continue
        owned, x = placed.owned_ILED, loads.iterations
        counts_IZLDE = loads.counts_IZLDE[..., : owned[0, 0].size // owned[0, 0].sum(), :]
        slots = int((placed.present_ILED & ~owned).sum(axis=2).max()) or 2
        most = min(50, -(-_MOST_SEARCHED // len(loads.layers)))
        for i, layer in enumerate(loads.layers):
            changes = load_changes(counts_IZLDE[:, :, i], x, slots, most)
            cells = zip(changes, LOAD_CHANGES.values(), strict=True)
            words = ("–" if np.isnan(number) else f"{number:{form}}" for number, form in cells)
            rows.append((f"{shown.name}, layer {layer}", *words))
    if not rows:
        return []
    sentence = (
        "Max/mean device load under plain expert parallelism. Alike: share of load on the same experts as "
        "one before. Jumps: more has moved than drift explains. Removed: part of a micro-batch's max/mean "
        "- 1 that replicas, planned by these counts, would remove, in as many slots as the run had, or 2."
    )
    return [Section("Between micro-batches", sentence, [Table(("", *LOAD_CHANGES), tuple(rows))])]


def placement_section(runs: Sequence[ShownRun]) -> Section:
    """Show the replicas of every expert by iteration, and the strategies that ``auto`` changed."""
    title = "Replicas of every expert"
    if not any(shown.run.layers for shown in runs):
        return Section(title, NO_LAYERS)
    parts: list[Part] = []
    for shown in runs:
        placed = shown.run.placements
        if not shown.run.arrays["num_replicas_IL"].any():
            parts.append(f"No replicas in {shown.name}.")
        elif placed is None:
            parts.append(f"{shown.name}: placements.npy is not there, or cannot be read.")
        else:
            replicas_ILE = (placed.present_ILED & ~placed.owned_ILED).sum(axis=3)
            about = (shown.name if len(runs) > 1 else "", "replicas", placed.iterations, placed.layers)
            parts.append(figures.expert_maps(*about, replicas_ILE, len(runs)))
        if times := int((shown.run.arrays["resharded_experts_I"] > 0).sum()):
            parts.append(f"{shown.name}: experts moved to new owners {counted(times, 'time')}.")
    sentence = (
        "A replica is a copy of an expert on another device than its owner's, which computes a part of the "
        "expert's tokens. Experts whose load is high above should have replicas here."
    )
    if rows := tuple(row for shown in runs for row in _selections(shown)):
        header = ("auto's change before", "layers", "strategy", "predicted gain", "seen gain")
        parts.append(Table(header, rows))
        parts.append(
            "Predicted: modelled milliseconds of an iteration that the change saves. Seen: by how much the "
            "median iteration became shorter until the next change. The loads can have changed."
        )
    return Section(title, sentence, parts)


def _selections(shown: ShownRun) -> Iterator[tuple[str, ...]]:
    """Yield ``auto``'s changes: when, which layers, the new strategy, predicted and seen gain."""
    records = shown.run.metrics
    changes = [i for i, record in enumerate(records) if any(made.changed for made in record.selections)]
    for before, here, after in zip([0, *changes], changes, [*changes[1:], len(records)], strict=False):
        # The first iteration after a change allocates memory and fills caches.
        seconds = (
            [record.iteration_s for record in records[i + 1 : j]] for i, j in ((before, here), (here, after))
        )
        before_s, after_s = (float(np.median(of_some)) if of_some else np.nan for of_some in seconds)
        record, gain_s = records[here], before_s - after_s
        for made in record.selections:
            if made.changed:
                chosen = {layer.strategy or "–": 0 for layer in record.layers if layer.layer in made.changed}
                yield (
                    f"{shown.name}, iteration {record.iteration:,}",
                    ", ".join(map(str, made.changed)),
                    ", ".join(chosen),
                    _gain(made.predicted_s, before_s),
                    "not known" if np.isnan(gain_s) else _gain(gain_s, before_s),
                )


def _gain(seconds: float, iteration_s: float) -> str:
    share = "" if np.isnan(iteration_s) else f" ({seconds / iteration_s:.1%})"
    return f"{1e3 * seconds:.3g} ms{share}"
