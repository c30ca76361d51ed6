"""Megatron-LM's own training recipes: the table of docs/compatibility.md is true.

The tests need a Megatron-LM checkout (``MEGATRON_LM_PATH``). Training all small copies takes most of an hour
on two cores, with stand-ins for the linear layers of Transformer Engine (``grouped_linear.py``) and for the
kernels of DeepEP and HybridEP (``fused_dispatch.py``).
"""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from . import recipes
from .fused_dispatch import install_fused_dispatch
from .training.parity.test_prepared_trainings import build_grouped_experts
from .training.parity.test_strategy_parity import cheap_links
from .training_run import TrainingRun, flags, relative_difference, train

CHECKOUT = os.environ.get(recipes.VARIABLE)
FOUND = recipes.recipes(Path(CHECKOUT)) if CHECKOUT else []
needs_checkout = pytest.mark.skipif(not CHECKOUT, reason=f"needs a Megatron-LM checkout ({recipes.VARIABLE})")

STRATEGIES = (
    "fssdp slots=2 overlap_degree=2 reshard_interval=2",
    "auto choice_interval=1 FSSDP_PROFILE_ITERATIONS=1",
)
TOLERANCE = {True: 2e-3, False: 3e-5}


@needs_checkout
@pytest.mark.slow
def test_the_table_is_that_of_the_code():
    assert len(FOUND) == 68
    page = recipes.PAGE.read_text(encoding="utf-8")
    assert recipes.written_table(page) == recipes.table(FOUND, recipes.refusals(FOUND))


def _small_copies() -> dict[str, recipes.SmallCopy]:
    """The different small copies, by the name of the first recipe with each of them."""
    names: dict[recipes.SmallCopy, str] = {}
    for recipe in FOUND:
        if recipe.obstacle is None:
            names.setdefault(recipes.small_copy(recipe), recipe.name)
    return {name: copy for copy, name in names.items()}


@pytest.fixture(scope="module")
def refusal_of():
    return dict(zip((recipe.name for recipe in FOUND), recipes.refusals(FOUND), strict=True))


@needs_checkout
@pytest.mark.slow
# Without these identifiers, pytest numbers the longest names.
@pytest.mark.parametrize("name", _small_copies(), ids=list(_small_copies()))
def test_a_small_copy_trains_with_stock_losses(name, refusal_of, text_data):
    if refusal_of[name] is not None:
        pytest.skip(f"refused: {refusal_of[name]}")
    copy = _small_copies()[name]
    for flag, package in (("muon", "emerging_optimizers"), ("instances 2", "einops")):
        if flag in copy.arguments and find_spec(package) is None:
            pytest.skip(f"Megatron needs {package} for this optimizer")
    stock = _train(copy, "", text_data)
    is_half = "--bf16" in copy.arguments or "--fp16" in copy.arguments
    for strategy in STRATEGIES:
        ours = _train(copy, flags(strategy), text_data)
        difference = relative_difference(ours.losses, stock.losses)
        print(f"{name}: {strategy}: {difference:.1e}")
        assert difference <= TOLERANCE[is_half], strategy


def _train(copy: recipes.SmallCopy, more: str, data: Path) -> TrainingRun:
    before = partial(_prepare, grouped="--moe-grouped-gemm" in copy.arguments)
    return train(copy.num_ranks, f"{copy.arguments} {more}", data, before=before)


def _prepare(*, grouped: bool) -> None:
    cheap_links()
    install_fused_dispatch()
    if grouped:
        build_grouped_experts(fuses=False)
