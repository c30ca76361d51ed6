"""Layers on forked ranks equal a reference without distributed logic, whatever their plans.

Each case compares outputs, gradients of inputs and Parameters, counts and loads of some iterations. The
routing is drawn; Megatron's whole layer with its router is compared in ``tests/megatron_adapter``. ``pytest
-m slow`` runs all cases.
"""

from dataclasses import replace

import pytest
import torch

from megatron_fssdp.collectives.transfer_lanes import TransferTimer
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.layer_plan import LayerPlan
from megatron_fssdp.testing import run_ranks
from tests.support.training_preload import TRAINING_PRELOAD, on_layer_ranks

from ..case_run import CaseRun, compare_with_reference
from ..layer_case import LayerCase

# Relative to the largest value of each tensor.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}
NOBODY = (0, 0, 2, 2, 2, 3, 3, 0)  # device 1 owns nothing
LIVES = (ReplicaLife.ITERATION, ReplicaLife.LAYER_PASS, ReplicaLife.MICRO_BATCH, ReplicaLife.RESIDENT)
FOUR = [
    LayerCase(f"{life.name}-{name}", life, **options)
    for life in LIVES
    for name, options in {
        "plain": {"num_iterations": 3, "num_nodes": 1},
        "in-flight": {"schedule": "FFFBFBBFBB", "has_main_grad": True},
        "everywhere": {"placement": "everywhere", "schedule": "FFBBE"},
        "reentrant": {"recompute": "reentrant", "schedule": "FFBB"},
        # As another micro-batch may add slots, a recomputed pass has those of the first one.
        "non-reentrant": {"recompute": "non_reentrant", "schedule": "FFBB"},
        "moving": {"moves": True, "num_iterations": 3},
        "owns-nothing": {"owners": NOBODY, "placement": "replicas_only", "schedule": "FBFBE"},
        "holds-nothing": {"owners": NOBODY, "placement": "nowhere_else"},
        "repeated": {"repeats": True, "schedule": "FFBFBB"},
        "dropped": {"routing": "dropped", "schedule": "FFBB"},
        "one-expert": {"routing": "one_expert"},
        "few-tokens": {"tokens": (1, 0, 0, 2), "schedule": "FBFB"},
        "no-tokens": {"tokens": (0, 0, 0, 0)},
        "in-turn": {"overlaps": False, "schedule": "FFBB"},
        "late": {"late": True, "schedule": "FFBB", "has_main_grad": True},
        "frozen": {"frozen": (0,), "inputs": ()},
        "interrupted": {"schedule": "FeFBeBOE", "top_k": 8, "num_iterations": 3},
        "expert-each": {"schedule": "FFBBO", "num_experts": 4, "top_k": 1, "recompute": "reentrant"},
        "bf16": {"dtype": torch.bfloat16, "schedule": "FFBB", "has_main_grad": True},
    }.items()
] + [
    LayerCase("outside", placement="ep", driven=False, num_iterations=3),
    LayerCase("split", early=0.4, schedule="FFBFBB", num_layers=3),
    LayerCase("split-late-repeated", early=0.4, late=True, repeats=True, schedule="FBFB", owners=NOBODY),
    LayerCase("split-recomputed", early=0.4, recompute="reentrant", schedule="FFBB", has_main_grad=True),
    LayerCase("mixed", mixes=True, num_layers=4, num_iterations=3, schedule="FFBFBB", early=0.3),
    LayerCase(
        "mixed-bf16",
        mixes=True,
        num_layers=4,
        recompute="reentrant",
        schedule="FFBB",
        has_main_grad=True,
        dtype=torch.bfloat16,
    ),
    LayerCase("corrected", corrects=True, schedule="FFBB"),
    LayerCase("corrected-recomputed", corrects=True, recompute="reentrant", schedule="FFBB", repeats=True),
    LayerCase("corrected-in-turn", corrects=True, overlaps=False, schedule="FBFB"),
    LayerCase("corrected-layer-pass", ReplicaLife.LAYER_PASS, corrects=True, schedule="FFBB"),
    LayerCase("corrected-split", corrects=True, early=0.4, schedule="FFBB", placement="everywhere"),
    *(
        LayerCase(
            f"announced-{announced}-{life.name}",
            life,
            schedule="FBEFFBB",
            recompute=recompute,
            announced=announced,
            has_main_grad=True,
        )
        for life in LIVES
        for announced, recompute in ((1, None), (2, "reentrant"), (9, None))
    ),
    *(
        LayerCase(
            f"{name}-{recompute}",
            placement=name,
            settings=settings,
            recompute=recompute,
            schedule="FFBB",
            num_iterations=4,
            life=life,
        )
        for recompute in (None, "reentrant")
        for name, settings, life in (
            ("ep", (), ReplicaLife.ITERATION),
            ("fssdp", (("slots", 4), ("overlap_degree", 4)), ReplicaLife.ITERATION),
            ("prophet", (("slots", 2),), ReplicaLife.ITERATION),
            ("fastermoe", (("slots", 2),), ReplicaLife.MICRO_BATCH),
            ("quota", (("slots", 2),), ReplicaLife.MICRO_BATCH),
        )
    ),
    *(
        LayerCase(f"peers-{life.name}", life, peers=2, num_nodes=1, schedule="FFBB", recompute=recompute)
        for life, recompute in zip(LIVES, (None, "reentrant", None, None), strict=True)
    ),
]
ALONE = [
    LayerCase("alone", num_nodes=1, schedule="FFBBE"),
    LayerCase("alone-ep", placement="ep", num_nodes=1, recompute="reentrant", num_iterations=3),
    LayerCase("alone-outside", placement="ep", num_nodes=1, driven=False),
]
NAMES = """
    ITERATION-owns-nothing RESIDENT-owns-nothing split-late-repeated ITERATION-expert-each corrected
    MICRO_BATCH-non-reentrant peers-LAYER_PASS peers-MICRO_BATCH fssdp-None quota-None
"""
# These need no second rank of a node; on two ranks they take half of the work.
NAMES_ON_TWO = """
    ITERATION-in-flight MICRO_BATCH-in-flight MICRO_BATCH-reentrant LAYER_PASS-repeated MICRO_BATCH-late
    LAYER_PASS-interrupted RESIDENT-interrupted ITERATION-bf16 outside split-recomputed mixed mixed-bf16
    corrected-recomputed corrected-split announced-1-ITERATION announced-2-RESIDENT announced-9-MICRO_BATCH
"""


# Most options are in two lives of replicas.
DEFAULT, ON_TWO = ([case for case in FOUR if case.name in names.split()] for names in (NAMES, NAMES_ON_TWO))
MORE = [case for case in FOUR if case not in DEFAULT]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(1, ALONE), (2, ON_TWO), (4, DEFAULT), pytest.param(4, MORE, marks=pytest.mark.slow)],
    ids=["alone", "on two ranks", "on four ranks", "more on four ranks"],
)
def test_layers_equal_the_reference(world_size, cases):
    by_rank = run_ranks(compare_with_reference, world_size, cases, preload=TRAINING_PRELOAD)
    for case in cases:
        check(case, [results[case.name] for results in by_rank])


def check(case, results):
    quantities = set[str]()
    for rank, result in enumerate(results):
        quantities |= set(result.errors)
        worst = max(result.errors.values(), default=0)
        assert worst <= TOLERANCE[case.dtype], f"{case.name}: {result.errors} on rank {rank}"
        if case.placement in ("nowhere_else", "replicas_only") and rank == 1:
            assert any(result.num_present) == (case.placement == "replicas_only"), case.name
        if len(results) > 1 and case.placement not in ("owners", "ep"):
            lives = {case.life, *([ReplicaLife.LAYER_PASS] if case.mixes else [])}
            assert result.lives == lives, f"{case.name}: no replicas, or of another life"
    if case.tokens != (0, 0, 0, 0):
        wanted = {"output", "parameter 1 gradient", *(f"{name} gradient" for name in case.inputs)}
        assert quantities >= wanted, case.name


@on_layer_ranks(1)
def test_a_gather_that_delays_the_dispatch_is_exposed():
    """A gather from 8 to 11.5 s and a reduction beside a dispatch from 10 to 14 s."""
    layer = CaseRun(LayerCase("delayed", num_nodes=1)).layers[0].slots
    forward = layer.local.load.forward
    layer.local.timer._marks += [(forward, "dispatch", 10.0), (forward, "experts", 14.0), (None, None, 15.0)]
    layer.local.journal += [TransferTimer(True, 0, 8.0, 11.5), TransferTimer(False, 0, 10.0, 12.0)]
    layer.local.timer.stop()
    load = layer.end_iteration()
    assert (load.spag_exposed_s, load.sprs_exposed_s) == (1.5, 0.0)
    assert (load.forward.dispatch_s, load.forward.experts_s) == (2.5, 1.0)


@on_layer_ranks(4)
def test_a_pass_outside_of_iterations_does_not_follow_later_plans():
    """The second of three plans has no replicas, and the first pass outside of iterations comes after it."""
    case = LayerCase("between", placement="everywhere", schedule="FBO", num_layers=1, num_iterations=3)
    run = CaseRun(case)
    drawn, evaluate, history = run.strategy.before_gate, run._evaluate, run.layers[0].slots.history

    def before_gate(context, loads):
        plan = replace(drawn(context, loads), dispatch_policy="even")
        return LayerPlan.owners_only(context) if loads.num_seen == 1 else plan

    run.strategy.before_gate = before_gate
    run._evaluate = lambda letter: evaluate(letter) if history.num_seen > 1 else None
    assert max(run.run().errors.values()) <= TOLERANCE[torch.float64]
