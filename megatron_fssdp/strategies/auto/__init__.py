"""``auto``: for each layer the strategy with the fewest modelled seconds."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Self

from pydantic import Field, create_model, model_validator

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_registry import RegisteredStrategy, shipped
from megatron_fssdp.config.strategy.strategy_settings import (
    CollectiveOrder,
    ExchangeKeys,
    PlacementSettings,
    TokenTravel,
)
from megatron_fssdp.strategies.ep import EpSettings


class AutoSettings(ExchangeKeys):
    """``auto``: for each layer the strategy with the fewest modelled seconds."""

    choice_interval: int = setting(
        50,
        "Number of iterations after which strategies are reconsidered. The first selection happens as soon "
        "as costs are measured; until then, every layer uses ep.",
        ge=1,
    )

    candidate_settings: ClassVar[Mapping[str, type[Any]]] = {}
    """Settings models of the candidates in addition to ``ep``; the table of strategies adds their keys."""

    @classmethod
    @cache
    def with_candidates(cls, candidates: tuple[RegisteredStrategy, ...]) -> type[Self]:
        """The same keys, and one for each candidate."""
        also = "true: with default settings. false: not a candidate. A mapping: with these settings."
        keys: dict[str, Any] = {
            entry.name: (
                bool | entry.settings,
                Field(default=True, description=f"Candidate: {entry.summary}. {also}"),
            )
            for entry in candidates
        }
        model = create_model(
            cls.__name__, __base__=cls, __module__=cls.__module__, __doc__=cls.__doc__, **keys
        )
        model.candidate_settings = {entry.name: entry.settings for entry in candidates}
        return model

    @property
    def travel(self) -> TokenTravel:
        """The schedule is selected by modelled seconds; tokens that are sent once have Megatron's."""
        schedule: CollectiveOrder = "auto" if self.exchange == "megatron" else "megatron"
        return replace(super().travel, schedule=schedule)

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        for name in self.candidate_settings:
            candidate = getattr(self, name)
            if not isinstance(candidate, PlacementSettings):
                continue
            shared = {*EpSettings.model_fields, *candidate.decided_for_all}
            if wrong := sorted(shared & candidate.model_fields_set):
                known = sorted(set(type(candidate).model_fields) - shared)
                raise ValueError(
                    f"{name}.{wrong[0]} has no meaning for a candidate, because all candidates share one "
                    f"runtime and the same owners; wanted {', '.join(known)}; remove the key"
                )
        return self

    @property
    def candidates(self) -> dict[str, PlacementSettings]:
        """Settings of all candidates by name. ``ep`` is the first."""
        candidates: dict[str, PlacementSettings] = {"ep": EpSettings()}
        for name, model in self.candidate_settings.items():
            given: bool | PlacementSettings = getattr(self, name)
            if given is not False:
                candidates[name] = model() if given is True else given
        return candidates


ENTRY = shipped(AutoSettings, "auto.auto_strategy:build_auto", "#8C564B", is_ranked=False)
