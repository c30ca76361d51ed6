import pytest
import torch

from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertWeights


@pytest.mark.parametrize("biases", [False, True])
def test_tensors_keep_their_order_and_their_contents(biases: bool) -> None:
    shapes = ((6, 3), (3, 6), (6,), (3,))[: 4 if biases else 2]
    weights = ExpertWeights(*(torch.randn(*reversed(shape)).T for shape in shapes))
    tensors = weights.tensors()
    layout = ExpertLayout.of(tensors)
    flat = layout.pack(tensors)
    assert (flat.shape, flat.nbytes) == ((layout.numel,), layout.num_bytes)
    again = ExpertWeights.from_tensors(layout.unpack(flat))
    assert all(map(torch.equal, again.tensors(), tensors))
    assert (again.fc1_bias is not None) == (again.fc2_bias is not None) == biases
    flat.fill_(7)
    assert again.fc2.eq(7).all(), "unpacked tensors are views"
    assert not tensors[1].eq(7).any(), "packing copies"


def test_tensors_that_do_not_fit_one_chunk_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted one"):
        ExpertLayout.of([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)])
    with pytest.raises(ValueError, match="got 3, wanted 2"):
        ExpertWeights.from_tensors([torch.zeros(1)] * 3)
