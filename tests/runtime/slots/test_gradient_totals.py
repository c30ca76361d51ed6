import torch

from megatron_fssdp.runtime.slots.gradient_totals import GradientTotals


def test_what_is_added_to_totals_is_in_the_gradients_also_if_these_are_not_contiguous():
    plain, turned, frozen = (
        torch.nn.Parameter(x) for x in (torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2))
    )
    plain.grad, frozen.requires_grad = torch.full((2, 3), 5.0), False
    totals = GradientTotals((plain, turned, frozen))
    assert totals.tensors[0] is plain.grad
    assert all(total.is_contiguous() for total in totals.tensors)
    for total in totals.tensors[:2]:
        total.view(-1).add_(torch.arange(6.0))
    assert totals.tensors[2].is_meta
    totals.write()
    assert turned.grad is not None
    assert torch.equal(plain.grad - 5, torch.arange(6.0).view(2, 3))
    assert torch.equal(turned.grad, torch.arange(6.0).view(2, 3))
    assert frozen.grad is None
