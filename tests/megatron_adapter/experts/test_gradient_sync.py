import weakref
from functools import partial
from types import SimpleNamespace

import torch

from megatron_fssdp.megatron_adapter.experts import gradient_sync


class HomeLayer:
    """A layer that misses no gradients."""

    gradients = SimpleNamespace(is_home=True, note_reduction=lambda: None)


def test_a_reduction_for_which_megatron_keeps_no_handle_starts_once_in_an_iteration():
    """So it is with several instances of the distributed optimizer; each start scales the gradients."""
    layer, parameter, starts = HomeLayer(), torch.nn.Parameter(torch.zeros(1)), []
    known = weakref.ref(layer)
    setattr(parameter, gradient_sync._SLOT, gradient_sync._Slot(known, known, lambda: lambda: None))
    group = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_grad_reduce=True),
        params=[parameter],
        grad_reduce_handle=None,
        grad_reduce_finished=False,
    )
    group.start_grad_sync = partial(gradient_sync._start_when_home, starts.append, group)
    for iteration in (1, 2):
        group.start_grad_sync()
        gradient_sync._finish_when_home(lambda _: None, group)
        assert len(starts) == iteration
        assert group.grad_reduce_handle is None
