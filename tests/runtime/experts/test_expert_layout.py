import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertWeights
from tests.drawn_examples import examples

shapes = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2).map(tuple), min_size=1, max_size=4)


@given(shapes, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
@examples(60)
def test_unpacking_a_packed_expert_gives_it_back(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    tensors = [torch.randn(*shape).to(dtype) for shape in shapes]
    layout = ExpertLayout.of(tensors)
    chunk = layout.pack(tensors)
    assert chunk.shape == (layout.numel,)
    assert chunk.dtype == dtype
    assert chunk.nbytes == layout.num_bytes
    unpacked = layout.unpack(chunk)
    assert len(unpacked) == len(tensors)
    assert all(torch.equal(*pair) for pair in zip(unpacked, tensors, strict=True))


def test_packing_copies_and_unpacking_returns_views() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    transposed = weight.T
    layout = ExpertLayout.of([transposed])
    chunk = layout.pack([transposed])
    weight.zero_()
    assert chunk.tolist() == [0, 3, 1, 4, 2, 5]
    layout.unpack(chunk)[0].fill_(7)
    assert chunk.eq(7).all()


@pytest.mark.parametrize("biases", [False, True])
def test_the_tensors_of_an_expert_keep_their_order(biases: bool) -> None:
    fc1, fc2, b1, b2 = torch.randn(6, 3), torch.randn(3, 6), torch.randn(6), torch.randn(3)
    weights = ExpertWeights(fc1, fc2, b1, b2) if biases else ExpertWeights(fc1, fc2)
    tensors = weights.tensors()
    assert [id(t) for t in tensors] == [id(t) for t in ((fc1, fc2, b1, b2) if biases else (fc1, fc2))]
    assert ExpertWeights.from_tensors(tensors) == weights
    layout = ExpertLayout.of(tensors)
    assert ExpertWeights.from_tensors(layout.unpack(layout.pack(tensors))).fc2.equal(fc2)


def test_tensors_that_do_not_fit_one_chunk_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted one"):
        ExpertLayout.of([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)])
    with pytest.raises(ValueError, match="got 3, wanted 2"):
        ExpertWeights.from_tensors([torch.zeros(1)] * 3)
