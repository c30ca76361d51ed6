"""Reads and writes ``evaluations.jsonl``: the losses of Megatron's evaluations."""

import math
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_fssdp.config.json_records import Count
from megatron_fssdp.records.json_lines import JsonLinesWriter, read_json_lines
from megatron_fssdp.records.metrics import Loss

EVALUATIONS_FILE = "evaluations.jsonl"


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


def append_evaluation(record_dir: Path, evaluation: Evaluation) -> None:
    """Add an evaluation to the file of a run.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    with closing(JsonLinesWriter(record_dir / EVALUATIONS_FILE)) as lines:
        lines.append(asdict(evaluation))


def read_evaluations(record_dir: Path) -> tuple[Evaluation, ...]:
    """Read the evaluations of a run in the order of iterations; none if the run has no such file.

    A resumed run repeats the evaluations after its checkpoint. Only the repetition counts.

    Raises:
        ConfigurationError: The file cannot be read, or a line is damaged.
    """
    path = record_dir / EVALUATIONS_FILE
    found: list[Evaluation] = []
    for new in read_json_lines(path, Evaluation) if path.exists() else ():
        found = [
            old
            for old in found
            if old.iteration < new.iteration or (old.iteration == new.iteration and old.data != new.data)
        ]
        found.append(new)
    return tuple(found)
