import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.runtime.exchange.chunk_permutation import chunk_permutation, select, transposed_order
from tests.drawn_examples import examples

CPU = torch.device("cpu")


@st.composite
def chunked_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    return np.array(sizes), np.array(draw(st.permutations(range(len(sizes)))))


@given(chunked_rows())
@examples(60)
def test_the_permutation_brings_chunks_into_the_wanted_order(case: tuple[np.ndarray, np.ndarray]) -> None:
    sizes, order = case
    rows = torch.arange(int(sizes.sum()))
    chunks = torch.split(rows, sizes.tolist())
    wanted = torch.cat([chunks[chunk] for chunk in order])
    index = chunk_permutation(sizes, order, CPU)
    assert torch.equal(select(rows, index), wanted)
    assert (index is None) == torch.equal(rows, wanted)


@given(chunked_rows())
@examples(60)
def test_the_inverse_permutation_restores_the_order(case: tuple[np.ndarray, np.ndarray]) -> None:
    sizes, order = case
    rows = torch.randn(int(sizes.sum()), 2)
    there = select(rows, chunk_permutation(sizes, order, CPU))
    back = select(there, chunk_permutation(sizes[order], np.argsort(order), CPU))
    assert torch.equal(back, rows)


@given(st.integers(1, 5), st.integers(0, 5))
@examples(60)
def test_the_transposed_order_swaps_rows_and_columns(rows: int, columns: int) -> None:
    grid = [(row, column) for row in range(rows) for column in range(columns)]
    assert [grid[i] for i in transposed_order(rows, columns)] == sorted(grid, key=lambda cell: cell[::-1])
