"""Everything that a check found, for its page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fssdp.cli.gpu_check.check_plan import CheckPlan
from megatron_fssdp.cli.gpu_check.machine_facts import MachineFacts
from megatron_fssdp.cli.gpu_check.parity import ParityRow
from megatron_fssdp.cli.gpu_check.step import StepResult, StepVerdict


@dataclass(frozen=True)
class CheckOutcome:
    """Everything that a check found.

    Attributes:
        plan: What the check ran on.
        facts: Facts about the machine.
        results: Results of the steps, in order.
        parity: One row for each training.
    """

    plan: CheckPlan
    facts: MachineFacts
    results: Sequence[StepResult]
    parity: Sequence[ParityRow] = ()

    @property
    def passed(self) -> bool:
        """Whether no step failed."""
        return not self.count(StepVerdict.FAILED)

    def count(self, verdict: StepVerdict) -> int:
        """Return the number of steps with a verdict."""
        return sum(result.verdict is verdict for result in self.results)

    @property
    def machine(self) -> str:
        """The devices of the check in one phrase."""
        if self.plan.is_virtual:
            return (
                f"{self.plan.num_ranks} virtual devices: CPU processes that pose as CUDA devices, on "
                f"{self.facts.num_cores} CPU cores"
            )
        kinds = dict.fromkeys(self.facts.devices)
        return ", ".join(f"{self.facts.devices.count(kind)} × {kind}" for kind in kinds)

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        counts = ", ".join(
            f"{number} {verdict}" for verdict in StepVerdict if (number := self.count(verdict))
        )
        return f"{'PASSED' if self.passed else 'FAILED'}: {len(self.results)} steps, {counts}"

    def result_of(self, name: str) -> StepResult | None:
        """Return the result of a step, or ``None`` if the check has no such step."""
        return next((result for result in self.results if result.step.name == name), None)

    def written_json(self, file_name: str) -> Any:
        """Return the content of a JSON file that a step wrote, or ``None`` if it is missing or damaged."""
        try:
            return json.loads((self.plan.results / file_name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def summary_json(self) -> str:
        """Return steps, losses and facts as JSON text, for programs."""
        return json.dumps(
            {
                "verdict": "passed" if self.passed else "failed",
                "is_virtual": self.plan.is_virtual,
                "num_ranks": self.plan.num_ranks,
                "facts": json.loads(self.facts.json()),
                "steps": [
                    {
                        "name": result.step.name,
                        "verdict": result.verdict,
                        "reason": result.reason,
                        "seconds": round(result.seconds, 1),
                        "command": list(result.step.command),
                    }
                    for result in self.results
                ],
                "parity": [
                    {
                        "case": row.case,
                        "precision": row.precision,
                        "losses": row.losses,
                        "first_difference": row.first_difference,
                        "largest_difference": row.largest_difference,
                        "num_replicas": row.num_replicas,
                        "transferred_bytes": row.transferred_bytes,
                        "num_resharded": row.num_resharded,
                    }
                    for row in self.parity
                ],
            },
            indent=1,
        )
