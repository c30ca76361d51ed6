"""Forecasts of a layer's load in the next iteration: the mean, the last load, and the trend.

Each forecast is a weighted sum of the latest loads. Which one is best depends on the training: the mean evens
out small batches, the last load follows a gate that wanders, and the trend follows a gate that drifts in one
direction. :class:`~megatron_fssdp.planning.loads.load_history.LoadHistory` uses the forecast that would have
predicted the last iterations best. This choice is ours; Hecate (§4.2) always takes the mean.

Shape letters: I iterations, D devices, E experts.
"""

from functools import cache

import numpy as np

from megatron_fssdp.planning.placement.array_freezing import frozen_array

MEAN = 0
"""Row of the mean among the forecasts."""

LEAST_FOR_TREND = 3
"""Fewest iterations of a trend. Through two points there is always a line, also through noise."""


@cache
def forecast_weights(num_iterations: int) -> np.ndarray:
    """Weights of past iterations in each forecast: mean, last, trend.

    The trend is the line of least squares through the past loads, one iteration further.

    Args:
        num_iterations: Number of past iterations, I; at least 1.

    Returns:
        float64, read-only: one row of length I for each forecast, the oldest iteration first. Each row has
        the sum 1.
    """
    mean = np.full(num_iterations, 1 / num_iterations)
    last = np.eye(num_iterations)[-1]
    trend = last
    if num_iterations >= LEAST_FOR_TREND:
        time = np.arange(num_iterations) - (num_iterations - 1) / 2
        trend = mean + time / (time @ time) * (num_iterations + 1) / 2
    return frozen_array(np.stack([mean, last, trend]), np.float64)


def forecast_errors(past_IE: np.ndarray, load_E: np.ndarray) -> np.ndarray:
    """Share of the load that each forecast would have put on wrong experts, from 0 to 1.

    Args:
        past_IE: Loads of the iterations before, ``[I, E]``, the oldest first.
        load_E: The load that followed, ``[E]``. Its total may differ, because batch sizes may change.

    Returns:
        float64, one number for each forecast; zeros if one of the loads is empty.
    """
    weights = forecast_weights(len(past_IE))
    # Not a matrix product: its last digits depend on the processor, and all ranks must select one forecast.
    forecasts = np.maximum((weights[:, :, None] * past_IE).sum(axis=1), 0)
    totals, total = forecasts.sum(axis=1), load_E.sum()
    if not total or not totals.all():
        return np.zeros(len(totals))
    return np.abs(forecasts / totals[:, None] - load_E / total).sum(axis=1) / 2


def forecast_DE(past_IDE: np.ndarray, forecast: int) -> np.ndarray:
    """The counts that a forecast expects for the next iteration.

    Args:
        past_IDE: Counts of past iterations by source device and expert, ``[I, D, E]``, the oldest first.
        forecast: Row of :func:`forecast_weights`.

    Returns:
        float64 ``[D, E]``, never negative.
    """
    weights_I = forecast_weights(len(past_IDE))[forecast]
    return np.maximum((weights_I[:, None, None] * past_IDE).sum(axis=0), 0)
