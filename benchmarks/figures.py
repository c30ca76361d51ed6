"""Resolution and creation of all matplotlib figures."""

from typing import Any

from megatron_fssdp.config.errors import ConfigurationError

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
            f"plots need matplotlib; install it with `pip install matplotlib`{advice}"
        ) from None
    figure = Figure(figsize=size_inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
