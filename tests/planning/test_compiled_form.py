import os
import shutil
import sys

import pytest
from hypothesis import given

from devtools.measured_profile import CHEAP_TO_MOVE as PROFILE
from megatron_fssdp.planning import compiled_form, quotas, search
from megatron_fssdp.planning.compiled_form import kernel_form
from megatron_fssdp.planning.dispatch import token_dispatch
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer import transfer_plan
from megatron_fssdp.strategies import plan_price
from megatron_fssdp.strategies.prophet import prophet_strategy
from tests.drawn_examples import SEEDS, examples
from tests.support.python_process import python_output

from .placement_cases import owned_layers, placement_price, random_counts_DE

USERS = (plan_price, quotas, search, prophet_strategy, token_dispatch, transfer_plan)
needs_compiled = pytest.mark.skipif(
    kernel_form() != "compiled", reason=f"planning kernels: {kernel_form()}; nothing to compare with"
)


COMPILED, _ = compiled_form._kernels()
with pytest.MonkeyPatch.context() as patch:
    for name in compiled_form.NAMES:
        patch.setitem(sys.modules, COMPILED[name].__name__, COMPILED[name])
    PLAIN = compiled_form.plain_kernels()


def plans(form, topology, owner_E, counts_DE):
    """What every kernel finds for one layer."""
    with pytest.MonkeyPatch.context() as patch:
        for user in USERS:
            patch.setattr(user, "kernel", form.__getitem__)
        layer = search.layer_search(
            owner_E, counts_DE, topology, PROFILE, life=ReplicaLife.LAYER_PASS, hides=True
        )
        placement, seconds = layer.best_placement(slots=2)
        by_load = search.plan_materialization(owner_E, counts_DE, topology, overlap_degree=3, slots=2)
        price = placement_price(counts_DE, placement, topology, PROFILE, ReplicaLife.LAYER_PASS)
        model = prophet_strategy.ProphetModel(topology.num_devices, 1.0, 100, 100, 1.0, 1.0)
        of_layer = (owner_E, counts_DE, model, [0])
        prophets = prophet_strategy.greedy_placements(*of_layer, balance=0.5, slots=2)
        exact = token_dispatch.plan_dispatch("exact", counts_DE, placement, topology)
        return [
            exact.tokens_ED.tolist(),
            exact.busiest,
            placement.present_ED.tolist(),
            by_load.present_ED.tolist(),
            seconds,
            layer.seconds(placement),
            price.seconds,
            quotas.quota_assignment(owner_E, counts_DE, topology, slots=2).tolist(),
            [plan.present_ED.tolist() for plan in prophets],
            transfer_plan.two_level_transfer.__wrapped__(placement, topology).table.tolist(),
        ]


@needs_compiled
@examples(15)
@given(owned_layers(), SEEDS)
def test_both_forms_find_the_same(case, seed):
    topology, owner_E = case
    counts_DE = random_counts_DE(seed, topology.num_devices, owner_E.size)
    assert plans(PLAIN, topology, owner_E, counts_DE) == plans(COMPILED, topology, owner_E, counts_DE)


def form_of(package):
    """The form that a copy of the sources finds."""
    code = "from megatron_fssdp.planning.compiled_form import kernel_form; print(kernel_form())"
    return python_output("-c", code, cwd=package, PYTHONPATH=str(package)).strip()


def test_without_an_extension_of_the_present_source_planning_is_plain_python(tmp_path):
    root = compiled_form.FOLDER.parents[2]
    package = tmp_path / "megatron_fssdp"
    shutil.copytree(root / "megatron_fssdp", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "pyproject.toml").write_text("")
    assert form_of(tmp_path) == "plain Python, about 100 times slower (not compiled)"
    for name in compiled_form.NAMES:
        extension = package / "planning" / "kernels" / f"{name}{compiled_form.EXTENSION_SUFFIXES[0]}"
        extension.write_bytes(b"not an extension")
    assert "plain Python, about 100 times slower (the compiled kernels cannot be loaded" in form_of(tmp_path)
    os.utime(extension, (0, 0))
    assert form_of(tmp_path) == "plain Python, about 100 times slower (not compiled from the present source)"


def test_every_kernel_is_compiled_and_named():
    sources = {path.stem for path in compiled_form.FOLDER.glob("[!_]*.py")}
    assert sources == set(compiled_form.NAMES) == {path.stem for path in compiled_form.FOLDER.glob("*.pxd")}
