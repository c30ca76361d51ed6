"""The strategy that this process asked for, and the models that train under it.

A model joins when Megatron's DDP wraps it, because only models that are wrapped are trained by Megatron's
optimizers. Models that are never wrapped, such as reference models, stay Megatron's own.
"""

import atexit
import logging
import os
import sys
import weakref
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import log_single_rank

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings, StrategySettings
from megatron_fssdp.megatron_adapter.checkpoints import checkpoint_hints
from megatron_fssdp.megatron_adapter.experts.named_copies import install_exports
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostSettings, check_equal
from megatron_fssdp.megatron_adapter.iterations.model_iterations import ModelIterations
from megatron_fssdp.megatron_adapter.layer.model_layers import join, places_of
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession, nccl_options
from megatron_fssdp.megatron_adapter.support.megatron_repairs import log_in_quiet_hosts

logger = logging.getLogger(__name__)


class Attachment:
    """One strategy with its settings, for all models that DDP wraps from now on, each in its own session."""

    def __init__(self, name: str, settings: StrategySettings, host: HostSettings | None = None) -> None:
        self.name, self.settings, self.host = name, settings, host or HostSettings()
        self._models: list[weakref.ref[ModelIterations]] = []
        self.has_joined = False
        if isinstance(settings, PlacementSettings):
            atexit.register(self._tell_absence)

    @property
    def does_nothing(self) -> bool:
        """Whether nothing has to be installed: without records, ``none`` needs nothing."""
        is_stock = not isinstance(self.settings, PlacementSettings)
        return is_stock and self.settings.record_dir is None and not self.host.has_boards

    @property
    def models(self) -> list[ModelIterations]:
        """The models that have joined and still exist, in the order of their first chunks."""
        return [model for ref in self._models if (model := ref()) is not None]

    def take(self, config: Any, ddp_config: Any, module: torch.nn.Module) -> ModelIterations | None:
        """Let a model chunk that DDP is about to wrap join; ``None`` if it has no part in experts.

        Raises:
            ConfigurationError: The strategy cannot serve this model.
        """
        if not getattr(config, "num_moe_experts", None) or isinstance(module, torch.nn.ParameterList):
            return None
        if not parallel_state.model_parallel_is_initialized():
            if not isinstance(self.settings, PlacementSettings):
                return None
            raise ConfigurationError(
                f"--moe-strategy {self.name}: got process groups outside of megatron.core.parallel_state "
                "(decentralized groups), wanted those of initialize_model_parallel(); use them, "
                "or --moe-strategy none"
            )
        numbers = set(places_of(module).values())
        model = next(reversed(self.models), None)
        # With virtual stages, a model of this rank has several chunks, which are wrapped one after another.
        if model is None or len(model.chunks) == model.num_chunks or numbers & model.numbers:
            model = self._new(config, ddp_config)
        model.numbers |= numbers
        if model.session is not None and join(module, model.session):
            self.has_joined = True
        return model

    def new_session(self, host: HostSettings) -> StrategySession | None:
        """A session under what a host says of itself; ``None`` without a strategy.

        Raises:
            ConfigurationError: The strategy cannot serve this host.
        """
        if not isinstance(self.settings, PlacementSettings):
            return None
        session = StrategySession(self.name, self._may_move(self.settings), nccl_options(host))
        session.check_model(*host.sources)
        return session

    def _new(self, config: Any, ddp_config: Any) -> ModelIterations:
        host = self.host.with_sources(config, ddp_config)
        devices = parallel_state.get_expert_model_parallel_group()
        # Layers join by collectives that depend on the strategy.
        asked = self.settings.model_dump(mode="json", exclude={"record_dir"})
        named = {f"--moe-strategy-set {key}": value for key, value in asked.items()}
        check_equal({"--moe-strategy": self.name, **named}, devices)
        if host.exports_by_name:  # Megatron-LM has a level of its own.
            log_in_quiet_hosts()
        if (session := self.new_session(host)) is not None:
            if session.settings is not self.settings:
                said = "[fssdp] this host may read experts by name, so owners do not move; reshard_interval=N"
                log_single_rank(logger, logging.INFO, f"{said} allows moves")
            checkpoint_hints.add(session)
            install_exports()
        model = ModelIterations(self.name, self.settings, host, session)
        model.num_chunks = config.virtual_pipeline_model_parallel_size or 1
        self._models.append(weakref.ref(model))
        return model

    def _may_move(self, settings: PlacementSettings) -> PlacementSettings:
        """Settings under which owners move only if that is safe or asked for."""
        is_asked = "reshard_interval" in settings.model_fields_set
        if is_asked or not self.host.exports_by_name or not hasattr(settings, "reshard_interval"):
            return settings
        if self.name == "smartmoe":
            raise ConfigurationError(
                "--moe-strategy smartmoe: got a host that may read experts by name (weight sync, exports), "
                "wanted your word that experts may move; set reshard_interval=N, and call "
                "megatron_fssdp.restore_owners(model) before such reads"
            )
        return settings.model_copy(update={"reshard_interval": 0})

    def _tell_absence(self) -> None:
        if self.has_joined or current() is not self or os.environ.get("RANK", "0") != "0":
            return
        said = f"[fssdp] --moe-strategy {self.name} did nothing: Megatron's DDP wrapped no MoE layer"
        # Ray's driver imports what attaches in its workers, or what only should.
        if "ray" in sys.modules and "RANK" not in os.environ:
            said += " in this process of Ray; if no worker says 'installed', attach in the workers, too"
        print(said, flush=True)


_current: Attachment | None = None


def current() -> Attachment | None:
    """The attached strategy; ``None`` if there is none."""
    return _current


def set_current(attachment: Attachment | None) -> None:
    """Attach a strategy to the models that DDP wraps from now on."""
    global _current
    _current = attachment
