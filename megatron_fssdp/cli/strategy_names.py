"""Names of the registered strategies in help texts, looked up when a command runs and not before."""

from typing import Any

from typer.core import TyperCommand

PLACE = "{strategies}"
"""Where a help text has the names."""


class NamingCommand(TyperCommand):
    """A command whose help texts have the names of all strategies in place of :data:`PLACE`."""

    def get_params(self, ctx: Any) -> Any:
        """The command's parameters; loads the strategies of installed packages where a text needs them."""
        params = super().get_params(ctx)
        for param in params:
            text = getattr(param, "help", None) or ""
            if PLACE in text:
                from megatron_fssdp.config.strategy_registry import STRATEGIES  # needs pydantic

                param.help = text.replace(PLACE, ", ".join(STRATEGIES))  # type: ignore[attr-defined]
        return params
