import pytest
import torch

from ..reference_layer import ACTIVATIONS as REFERENCE
from .activations import ACTIVATIONS as RUNTIME

F = 6


@pytest.mark.parametrize("name", RUNTIME)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_every_activation_equals_its_formula(name: str, bias: bool, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    width, function = REFERENCE[name]
    x = torch.randn(num_tokens, width * F, generator=generator, dtype=torch.float64, requires_grad=True)
    b = torch.randn(width * F, generator=generator, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(num_tokens, generator=generator, dtype=torch.float64, requires_grad=True)
    got = RUNTIME[name](x, b if bias else None, probs)
    wanted = function(x + b if bias else x) * probs.unsqueeze(1)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    leaves = [x, probs, b] if bias else [x, probs]
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, cotangent),
        torch.autograd.grad(wanted, leaves, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RUNTIME)
def test_activations_differ_on_the_tested_inputs(name: str) -> None:
    """Each activation differs from every other one on the inputs above."""
    x = torch.randn(9, 2 * F, generator=torch.Generator().manual_seed(3))
    probs = torch.ones(9)
    own = RUNTIME[name](x, None, probs)
    for other, activation in RUNTIME.items():
        result = activation(x, None, probs)
        assert other == name or result.shape != own.shape or not torch.allclose(result, own)


@pytest.mark.parametrize("name", RUNTIME)
def test_half_precision_outputs_stay_half_with_fp32_probabilities(name: str) -> None:
    x = torch.randn(3, REFERENCE[name][0] * F, dtype=torch.bfloat16)
    probs = torch.tensor([0.1, 1.0, 0.7])
    got = RUNTIME[name](x, None, probs)
    assert got.dtype is torch.bfloat16
    # The output is weighted in fp32 and rounded once; probabilities are not rounded.
    wanted = (REFERENCE[name][1](x).float() * probs.unsqueeze(1)).bfloat16()
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-6)
    assert torch.equal(got[1], RUNTIME[name](x, None, torch.ones(3))[1])
