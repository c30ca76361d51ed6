import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertWeights
from megatron_fssdp.runtime.experts.grouped_ffn import (
    _grouped,
    _grouped_matmul_pays,
    _one_by_one,
    grouped_ffn,
)
from megatron_fssdp.runtime.experts.grouped_kernel import device_has_grouped_kernel

from ..reference_layer import draw_weights, reference_forward
from .activations import ACTIVATIONS

M, F = 8, 16  # rows of 16 bytes in bf16, as grouped_mm requires
ROWS = [(3, 0, 5, 1), (0, 0, 7, 0), (4, 2, 2, 3), (0, 0, 0, 0)]


def draw(
    rows: tuple[int, ...], activation: str, biases: bool, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Rows sorted by expert, probabilities and weights, all leaves."""
    generator = torch.Generator().manual_seed(sum(rows))
    weights = draw_weights(5, len(rows), M, F, activation, biases)
    x = torch.randn(sum(rows), M, generator=generator, dtype=torch.float64)
    probs = torch.rand(sum(rows), generator=generator, dtype=torch.float64)
    leaves = [x, probs, *(tensor for tensors in weights for tensor in tensors)]
    leaves = [leaf.to(device, dtype).requires_grad_() for leaf in leaves]
    size = len(weights[0])
    return leaves[0], leaves[1], [leaves[i : i + size] for i in range(2, len(leaves), size)]


def experts_of(weights: list[list[Tensor]]) -> list[ExpertWeights]:
    return [ExpertWeights.from_tensors(tensors) for tensors in weights]


def leaves_of(x: Tensor, probs: Tensor, weights: list[list[Tensor]]) -> list[Tensor]:
    return [x, probs, *(tensor for tensors in weights for tensor in tensors)]


def gradients(output: Tensor, leaves: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output, leaves, cotangent, allow_unused=False))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("probs_on_input", [False, True])
def test_the_loop_equals_the_reference(
    rows: tuple[int, ...], activation: str, biases: bool, probs_on_input: bool
) -> None:
    x, probs, weights = draw(rows, activation, biases, torch.float64)
    expert_T = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    routing_map = functional.one_hot(expert_T, len(rows)).bool()
    wanted = reference_forward(
        x,
        probs.unsqueeze(1).expand(-1, len(rows)),
        routing_map,
        weights,
        activation,
        probs_on_input=probs_on_input,
    )
    got = grouped_ffn(
        x, probs, rows, experts_of(weights), ACTIVATIONS[activation], probs_on_input=probs_on_input
    )
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    cotangent = torch.randn_like(wanted)
    leaves = leaves_of(x, probs, weights)
    for ours, theirs in zip(
        gradients(got, leaves, cotangent), gradients(wanted, leaves, cotangent), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="torch has no grouped_mm")
@pytest.mark.parametrize("rows", ROWS[:3])
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "interleaved_swiglu"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_grouped_form_equals_the_loop(
    rows: tuple[int, ...], activation: str, biases: bool, dtype: torch.dtype, tolerance: float, device: str
) -> None:
    x, probs, weights = draw(rows, activation, biases, dtype, device)
    outputs, grads = [], []
    for ffn in (_grouped, _one_by_one):
        output = ffn(x, probs, rows, experts_of(weights), ACTIVATIONS[activation])
        outputs.append(output)
        # A sum's gradient has strides of zero, which grouped_mm's backward rejects.
        grads.append(gradients(output.sum(), leaves_of(x, probs, weights), torch.ones((), device=device)))
    assert outputs[0].dtype is dtype
    for got, wanted in zip([outputs[0], *grads[0]], [outputs[1], *grads[1]], strict=True):
        difference = (got - wanted).abs().max().item()
        assert difference <= tolerance * max(1.0, wanted.abs().max().item())
    empty = [grad for grad, n in zip(grads[0][2 :: len(weights[0])], rows, strict=True) if n == 0]
    assert all(grad.eq(0).all() for grad in empty)


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="torch has no grouped_mm")
@pytest.mark.parametrize("rows", ROWS[:3])
def test_the_grouped_kernel_never_sees_a_group_without_rows(
    rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some devices the kernel leaves the weight gradient of a group without rows unwritten."""
    x, probs, weights = draw(rows, "swiglu", False, torch.float32)
    original = functional.grouped_mm
    ends: list[list[int]] = []

    def recording(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        ends.append(offs.tolist())
        return original(a, b, offs=offs)

    monkeypatch.setattr(functional, "grouped_mm", recording)
    output = _grouped(x, probs, rows, experts_of(weights), ACTIVATIONS["swiglu"])
    assert output.shape == (sum(rows), M)
    output.sum().backward()
    assert len(ends) == 2 + 2 * 2  # two products; backward, of the rows and of the weights
    for ends_G in ends:
        assert ends_G[0] > 0
        assert ends_G == sorted(set(ends_G))
        assert ends_G[-1] == sum(rows)


class CreatedStorages(TorchDispatchMode):
    """Storages of all tensors that operations return, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Size, int, StorageWeakRef]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.found.append((tensor.shape, storage.nbytes(), StorageWeakRef(storage)))
        return result

    def alive_of(self, shapes: set[tuple[int, ...]]) -> list[torch.Size]:
        """Storages of the given shapes that are still referenced."""
        gc.collect()
        return [shape for shape, _, ref in self.found if tuple(shape) in shapes and not ref.expired()]


FORMS = [
    pytest.param(_grouped, marks=pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="old")),
    _one_by_one,
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_no_copy_of_a_weight_outlives_the_forward_pass(form: Any, biases: bool, device: str) -> None:
    x, probs, weights = draw(ROWS[2], "swiglu", biases, torch.bfloat16, device)
    own = {tensor.untyped_storage().data_ptr() for tensors in weights for tensor in tensors}
    matrices = [tensor.shape for tensor in weights[0] if tensor.dim() == 2]
    copies = {shape for n, k in matrices for shape in ((n, k), (k, n), (4, n, k), (4, k, n))}
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), CreatedStorages() as created:
        output = form(x, probs, ROWS[2], experts_of(weights), ACTIVATIONS["swiglu"])
    kept = [t for t in saved if tuple(t.shape) in copies and t.untyped_storage().data_ptr() not in own]
    assert not kept
    of_weights = [t for t in saved if t.untyped_storage().data_ptr() in own and t.dim() == 2]
    assert of_weights, "the backward pass needs the experts' own tensors"
    del saved[:], of_weights
    if form is _grouped:
        assert any(len(shape) == 3 for shape, _, _ in created.found), "nothing was stacked"
        assert not created.alive_of({shape for shape in copies if len(shape) == 3})
    assert output.requires_grad


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_weights_can_be_released_between_forward_and_backward(form: Any, device: str) -> None:
    """As ``ReplicaWeights`` releases them: same tensors, their storages emptied and filled again."""
    rows = ROWS[0]
    x, probs, weights = draw(rows, "swiglu", True, torch.bfloat16, device)
    wanted = gradients(
        form(x, probs, rows, experts_of(weights), ACTIVATIONS["swiglu"]).sum(),
        leaves_of(x, probs, weights),
        torch.ones((), device=device),
    )
    layout = ExpertLayout.of(weights[0])
    chunks = [layout.pack([tensor.detach() for tensor in tensors]) for tensors in weights]
    contents = [chunk.clone() for chunk in chunks]
    views = [[part.detach().requires_grad_() for part in layout.unpack(chunk)] for chunk in chunks]
    output = form(x, probs, rows, experts_of(views), ACTIVATIONS["swiglu"])
    for chunk in chunks:
        chunk.untyped_storage().resize_(0)
    for chunk, content in zip(chunks, contents, strict=True):
        chunk.untyped_storage().resize_(layout.num_bytes)
        chunk.data.copy_(content)
    got = gradients(output.sum(), leaves_of(x, probs, views), torch.ones((), device=device))
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="torch has no grouped_mm")
@pytest.mark.parametrize("frozen", ["rows", "experts"])
def test_inputs_that_need_no_gradient_get_none(frozen: str) -> None:
    x, probs, weights = draw(ROWS[2], "gelu", False, torch.float32)
    for leaf in [x] if frozen == "rows" else leaves_of(x, probs, weights)[2:]:
        leaf.requires_grad_(False)
    leaves = [leaf for leaf in leaves_of(x, probs, weights) if leaf.requires_grad]
    found = [
        gradients(
            form(x, probs, ROWS[2], experts_of(weights), ACTIVATIONS["gelu"]), leaves, torch.ones_like(x)
        )
        for form in (_grouped, _one_by_one)
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("probs_on_input", [False, True])
def test_without_experts_rows_and_probabilities_stay_in_the_graph(probs_on_input: bool) -> None:
    x = torch.empty(0, M, requires_grad=True)
    probs = torch.empty(0, requires_grad=True)
    output = grouped_ffn(x, probs, (), (), ACTIVATIONS["gelu"], probs_on_input=probs_on_input)
    assert output.shape == (0, M)
    output.sum().backward()
    assert x.grad is not None
    assert probs.grad is not None


def test_half_precision_rows_stay_half_with_fp32_probabilities() -> None:
    x, _, weights = draw(ROWS[0], "swiglu", True, torch.bfloat16)
    for probs_on_input in (False, True):
        output = grouped_ffn(
            x,
            torch.rand(len(x)),
            ROWS[0],
            experts_of(weights),
            ACTIVATIONS["swiglu"],
            probs_on_input=probs_on_input,
        )
        assert output.dtype is torch.bfloat16


def test_the_loop_runs_on_a_cpu() -> None:
    x, _, weights = draw(ROWS[0], "gelu", False, torch.bfloat16)
    assert not _grouped_matmul_pays(x, experts_of(weights))


@pytest.mark.gpu
def test_the_experts_never_make_the_host_wait() -> None:
    """With the grouped kernel where the device has it, and with the loop where it has not."""
    x, probs, weights = draw(ROWS[0], "swiglu", True, torch.bfloat16, "cuda")
    assert _grouped_matmul_pays(x, experts_of(weights)) == device_has_grouped_kernel(x.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_ffn(x, probs, ROWS[0], experts_of(weights), ACTIVATIONS["swiglu"]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
