"""Kinds of commands: with the strategies' names in the help, and with Megatron's arguments after ``--``."""

from typing import Any

from typer.core import TyperCommand

PLACE = "{strategies}"
"""Where a help text has the names."""

MEGATRON_WORDS = "megatron_fssdp.megatron_words"
"""Key in a context's ``meta`` under which :class:`PassingCommand` stores the words after ``--``."""


class NamingCommand(TyperCommand):
    """A command whose help texts have the names of all strategies in place of :data:`PLACE`."""

    def get_params(self, ctx: Any) -> Any:
        """The command's parameters; loads the strategies of installed packages where a text needs them."""
        params = super().get_params(ctx)
        for param in params:
            text = getattr(param, "help", None) or ""
            if PLACE in text:
                from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES  # needs pydantic

                param.help = text.replace(PLACE, ", ".join(STRATEGIES))  # type: ignore[attr-defined]
        return params


class PassingCommand(NamingCommand):
    """A command that passes all words after ``--`` on to Megatron and does not read them as its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before ``--`` and store those after it in ``ctx.meta``."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[MEGATRON_WORDS] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])
