"""Statements of the papers that name no number, only what is larger or faster than what."""

from collections.abc import Callable
from dataclasses import dataclass

Pairs = list[tuple[float, float]]


@dataclass(frozen=True)
class Claim:
    """A statement of a paper that one thing is larger than another one.

    Attributes:
        where: Figure, table or section of the paper.
        statement: The statement in words.
        pairs: Function of a spread that returns a pair for each simulated case. The statement holds in a case
            if the first value of its pair is larger than the second one.
        note: Why the statement does not hold in all cases, if so.
    """

    where: str
    statement: str
    pairs: Callable[[float], Pairs]
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """A claim with its simulated cases.

    Attributes:
        claim: Statement of the paper.
        pairs: One pair for each case, see :attr:`Claim.pairs`.
    """

    claim: Claim
    pairs: Pairs

    @property
    def holds_in(self) -> int:
        """Number of cases in which the statement holds."""
        return sum(large > small for large, small in self.pairs)

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the claim's line in the table of a paper."""
        ratios = [large / small for large, small in self.pairs]
        note = self.claim.note if self.holds_in < len(self.pairs) else ""
        return (
            self.claim.where,
            self.claim.statement,
            f"{self.holds_in} of {len(self.pairs)}",
            f"{min(ratios):.2f}–{max(ratios):.2f}",
            note,
        )
