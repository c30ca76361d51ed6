"""The commands of ``megatron-fssdp``. They need the packages of the extra ``tools``."""

import sys

_TOOLS = frozenset({"jinja2", "markupsafe", "matplotlib", "plotly", "psutil", "rich", "tokenizers", "typer"})


def main() -> None:
    """Entry point of the console script."""
    try:
        from megatron_fssdp.cli.app import main as run

        run()
    except ModuleNotFoundError as error:
        if error.name not in _TOOLS:
            raise
        hint = f"needs the package {error.name}, which is not installed; pip install 'megatron-fssdp[tools]'"
        print(f"error: this command {hint}", file=sys.stderr)
        sys.exit(2)
