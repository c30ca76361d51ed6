"""What all pictures have in common."""

from typing import Any

from megatron_fssdp.config.errors import ConfigurationError

# Okabe-Ito: told apart by colour-blind readers and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DPI = 150


def new_figure(size_inches: tuple[float, float], advice: str = "") -> Any:
    """An empty figure that needs no display.

    Args:
        size_inches: Width and height.
        advice: What else to do where matplotlib is missing, such as " or give --no-plots".

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            f"pictures need matplotlib; install it with `pip install megatron-fssdp[plots]`{advice}"
        ) from None
    figure = Figure(figsize=size_inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
