"""Generate the Markdown tables of docs/compatibility.md from what the code states about Megatron."""

from collections.abc import Iterable

from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_arguments import (
    CHECKPOINT_REPLACEMENTS,
    Replacement,
)
from megatron_fssdp.megatron_adapter.support import capabilities, dispatch_limits, supported_features
from megatron_fssdp.megatron_adapter.support.tested_versions import TESTED_VERSIONS


def tables() -> dict[str, str]:
    """Return each table by its NAME in the page's ``<!-- table: NAME -->``."""
    return {
        "versions": _table(("package", "tested range"), TESTED_VERSIONS.items(), code=True),
        "refused": _refusals(supported_features.REFUSALS),
        "combinations": _refusals(dispatch_limits.RULES),
        "replaced_checkpoints": _replacements(CHECKPOINT_REPLACEMENTS),
        "seams": _table(
            ("in Megatron", "what the plugin does with it", "who needs it"),
            ((f"`{seam.module}.{seam.path}`", seam.purpose, seam.needed_by) for seam in capabilities.SEAMS),
        ),
    }


def _refusals(refusals: Iterable[supported_features.Refusal | dispatch_limits.Rule]) -> str:
    return _table(("refused", "what to do"), ((what, advice) for what, _, advice in refusals))


def _replacements(replacements: Iterable[Replacement]) -> str:
    return _table(("given", "what happens instead"), ((one.what, one.meaning) for one in replacements))


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, code: bool = False) -> str:
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    lines += [f"| {' | '.join(f'`{cell}`' if code else cell for cell in row)} |" for row in rows]
    return "\n".join(lines)
