import pytest
import torch

from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout


@pytest.mark.parametrize("biases", [False, True])
def test_tensors_keep_their_order_and_their_contents(biases: bool) -> None:
    shapes = ((6, 3), (3, 6), (6,), (3,))[: 4 if biases else 2]
    tensors = [torch.randn(shape) for shape in shapes]
    layout = ExpertLayout.of(tensors)
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    assert (flat.shape, flat.nbytes) == ((layout.numel,), layout.num_bytes)
    again = layout.unpack(flat)
    assert len(again) == len(tensors)
    assert all(map(torch.equal, again, tensors))
    flat.fill_(7)
    assert again[1].eq(7).all(), "unpacked tensors are views"


def test_tensors_that_do_not_fit_one_chunk_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted one"):
        ExpertLayout.of([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)])
