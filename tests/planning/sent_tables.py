"""Whole tables of a dispatch, which the package never builds."""

import numpy as np

from megatron_fssdp.planning.dispatch.even_dispatch import EvenDispatch
from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch


def sent_by(dispatch: EvenDispatch | QuotaDispatch, source: int) -> np.ndarray:
    """Tokens that one source sends, by expert and receiving device, int64 ``[E, D]``."""
    num_devices, num_experts = dispatch.counts_DE.shape
    return dispatch.rows_from(source).table_ED(num_experts, num_devices)


def sent_by_all(dispatch: EvenDispatch | QuotaDispatch) -> np.ndarray:
    """Tokens by source, expert and receiving device, int64 ``[D, E, D]``."""
    return np.stack([sent_by(dispatch, source) for source in range(len(dispatch.counts_DE))])
