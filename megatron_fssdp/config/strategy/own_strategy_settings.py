"""Settings of strategies of our own: ``quota`` and ``auto``."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, create_model, model_validator

from megatron_fssdp.config.strategy.strategy_settings import (
    CollectiveSchedule,
    EpSettings,
    MeasuringSettings,
    PlacementSettings,
    SteppedSettings,
)


class QuotaSettings(MeasuringSettings):
    """``quota``: exact token quotas from each micro-batch's counts (our strategy, after ECHO and UltraEP)."""

    counts_of_experts = ("slots",)
    decided_for_all = ("overlap",)

    slots: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Maximum number of a layer's other experts that a device can compute. Default: as many as fit "
            "into the free memory."
        ),
    )
    overlap: bool = Field(
        default=True,
        description="Whether experts are sent at the same time as tokens. Off: before the tokens.",
    )


class AutoSettings(SteppedSettings):
    """``auto``: selects for each layer the strategy with the fewest modelled seconds (our strategy)."""

    profile_iterations: int = Field(
        default=3,
        ge=1,
        description=(
            "Number of iterations in which compute, links and memory are measured. Times of the first one, "
            "which is cold, count only if it is the only one. Until then, every layer uses ep."
        ),
    )
    choice_interval: int = Field(
        default=50,
        ge=1,
        description=(
            "Number of iterations after which strategies are reconsidered. Moved experts must pay off within "
            "this time. The first selection happens as soon as costs are measured."
        ),
    )
    compared_iterations: int = Field(
        default=3,
        ge=1,
        description="Number of the latest iterations for which every candidate plans when one is selected.",
    )
    least_gain: float = Field(
        default=0.03,
        ge=0,
        lt=1,
        description=(
            "Share of a layer's modelled seconds that another strategy, ep included, must save before the "
            "layer changes to it."
        ),
    )

    @property
    def collective_schedule(self) -> CollectiveSchedule:
        """The schedule ``auto``, which is selected by modelled seconds.

        Tokens that are sent once travel in Megatron's order.
        """
        return CollectiveSchedule("auto" if self.exchange == "megatron" else "megatron")

    candidate_settings: ClassVar[Mapping[str, type[PlacementSettings]]] = {}
    """Settings models of the strategies that can be selected in addition to ``ep``, by name.

    Each one is a key.
    """

    @classmethod
    def with_candidates(
        cls, candidates: Mapping[str, tuple[type[PlacementSettings], str]]
    ) -> type["AutoSettings"]:
        """Return a settings model with a key for each candidate.

        Args:
            candidates: Settings model and one-line summary of each strategy, by name.
        """
        fields: dict[str, Any] = {
            name: (
                bool | settings,
                Field(
                    default=True,
                    description=(
                        f"Candidate: {summary}. true: with default settings. false: not a candidate. A "
                        "mapping: with these settings."
                    ),
                ),
            )
            for name, (settings, summary) in candidates.items()
        }
        model = create_model(cls.__name__, __base__=cls, __module__=cls.__module__, **fields)
        model.__doc__ = cls.__doc__
        model.candidate_settings = {name: settings for name, (settings, _) in candidates.items()}
        return model

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        for name in self.candidate_settings:
            candidate = getattr(self, name)
            if not isinstance(candidate, PlacementSettings):
                continue
            shared = {*MeasuringSettings.model_fields, *candidate.decided_for_all}
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
        found: dict[str, PlacementSettings] = {"ep": EpSettings()}
        for name, model in self.candidate_settings.items():
            given: bool | PlacementSettings = getattr(self, name)
            if given is not False:
                found[name] = (model() if given is True else given).as_candidate()
        return found
