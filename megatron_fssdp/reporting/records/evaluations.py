"""Reads and writes ``evaluations.jsonl``: the losses of Megatron's evaluations."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.json_records import Count, parse_record
from megatron_fssdp.config.written_files import cannot_write
from megatron_fssdp.reporting.records.arrays.array_files import unreadable
from megatron_fssdp.reporting.records.run_records import without_nan

EVALUATIONS_FILE = "evaluations.jsonl"

_Loss = Annotated[float, BeforeValidator(lambda loss: math.nan if loss is None else loss)]


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        iteration: Number of iterations for which the model had been trained.
        data: The evaluated data: ``validation`` or ``test``, with the name of the set if there are several.
        losses: Mean of each loss by Megatron's name for it, such as ``lm loss``. NaN if it was not finite.
    """

    iteration: Count
    data: str
    losses: dict[str, _Loss]

    @property
    def loss(self) -> float:
        """The first loss, which is the language model's."""
        return next(iter(self.losses.values()), math.nan)


def append_evaluation(record_dir: Path, evaluation: Evaluation) -> None:
    """Add an evaluation to the file of a run.

    Args:
        record_dir: Folder of the run's records.
        evaluation: Result of the evaluation.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    path = record_dir / EVALUATIONS_FILE
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(without_nan(asdict(evaluation)), allow_nan=False) + "\n")
    except OSError as error:
        raise cannot_write(path, "record_dir", error) from None


def read_evaluations(record_dir: Path) -> tuple[Evaluation, ...]:
    """Read the evaluations of a run in the order of iterations; none if the run has no such file.

    A resumed run repeats the evaluations after its checkpoint. Only the repetition is returned. A line that
    the run was still writing when it was stopped is left out.

    Args:
        record_dir: Folder of the run's records.

    Raises:
        ConfigurationError: The file cannot be read, or a line before the last one is damaged.
    """
    path = record_dir / EVALUATIONS_FILE
    if not path.exists():
        return ()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    lines = text[: text.rfind("\n") + 1].splitlines()
    found: list[Evaluation] = []
    for number, line in enumerate(lines, start=1):
        try:
            evaluation = parse_record(Evaluation, line)
        except ValueError as error:
            raise ConfigurationError(
                f"{path}: line {number} is damaged ({error}); delete this line or record the run again"
            ) from None
        found = [
            one
            for one in found
            if one.iteration < evaluation.iteration
            or (one.iteration == evaluation.iteration and one.data != evaluation.data)
        ]
        found.append(evaluation)
    return tuple(found)
