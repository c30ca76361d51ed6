import weakref
from functools import partial
from types import SimpleNamespace

import megatron.core.utils
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


def test_gathers_of_parameters_are_finished_whatever_the_hooks_of_ddp_are_called(monkeypatch):
    monkeypatch.delattr(megatron.core.utils, "ensure_params_ready", raising=False)
    experts, ran = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)), []
    experts[0].register_forward_pre_hook(lambda *_: ran.append("another's"))
    handles = {
        part: part.register_forward_pre_hook(partial(lambda part: ran.append(part))) for part in experts
    }
    ddp = HomeLayer()
    ddp.remove_forward_pre_hook_handles = handles
    gradient_sync._note_hooks(lambda _: None, ddp)
    gradient_sync.await_parameters(experts)
    assert ran == [*experts]
    handles.clear()  # as DDP does for an evaluation
    gradient_sync.await_parameters(experts)
    assert len(ran) == 2
