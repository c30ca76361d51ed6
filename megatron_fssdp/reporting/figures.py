"""Colours, resolution and creation of all matplotlib figures."""

from typing import Any

from megatron_fssdp.config.errors import ConfigurationError

# The Okabe-Ito palette, which colour-blind readers can distinguish, also in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DPI = 150


def new_figure(size_inches: tuple[float, float], advice: str = "") -> Any:
    """Make an empty matplotlib figure that works without a display.

    Args:
        size_inches: Width and height in inches.
        advice: Other advice for users without matplotlib, such as ``" or give --no-plots"``.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            f"plots need matplotlib; install it with `pip install megatron-fssdp[plots]`{advice}"
        ) from None
    figure = Figure(figsize=size_inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
