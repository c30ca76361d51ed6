"""Where loads jump, plans before the gate come too late: ``quota`` is faster, and ``auto`` selects it."""

import pytest

from benchmarks.equal_memory import PAST, Case, compared, layer_job
from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.simulation.job_loads import generated_loads
from megatron_fssdp.simulation.simulator import simulate
from megatron_fssdp.strategies import auto
from megatron_fssdp.strategies.layer_plan import LayerPlan

JUMPING = [
    Case("parm-a", "mixtral-8x7b", "W6"),
    Case("trevor", "mixtral-8x22b", "W6"),
    Case("h200", "hecate-gpt-moe-s", "W7"),
]


def name_of(case: Case) -> str:
    return f"{case.cluster}-{case.model}-{case.workload}"


@pytest.mark.parametrize("case", JUMPING, ids=name_of)
def test_quota_is_faster_where_loads_jump(case: Case) -> None:
    found = compared(case, slots=2, iterations=12, with_host=False)
    assert found.best == "quota"
    assert found.speed < 1


@pytest.mark.parametrize("workload", ["W1", "lognormal-medium"])
def test_the_best_other_strategy_is_not_faster_where_loads_last(workload: str) -> None:
    found = compared(Case("lpwnv", "gpt-oss-120b", workload), slots=2, iterations=12, with_host=False)
    assert found.speed >= 0.99, f"{found.best} is faster"


@pytest.mark.parametrize("case", JUMPING[:2], ids=name_of)
def test_auto_selects_quota_where_loads_jump(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it compares as many iterations as there are from one jump to the next."""
    monkeypatch.setattr(auto, "COMPARED_ITERATIONS", 5)
    job, cluster = layer_job(case.model, case.cluster), load_cluster(case.cluster)
    cluster = cluster.model_copy(update={"memory_bytes": None})
    counts_ILDE = generated_loads(case.workload, job, PAST + 12)
    slots = {name: {"slots": 2} for name in ("fssdp", "prophet", "fastermoe", "quota")}
    plans: list[LayerPlan] = []
    simulate(
        "auto",
        STRATEGIES["auto"].settings.model_validate(slots),
        counts_ILDE[PAST:],
        cluster,
        job,
        past_ILDE=counts_ILDE[:PAST],
        on_plan=lambda iteration, layer, plan: plans.append(plan),
    )
    are_of_quota = [plan.each_micro_batch for plan in plans]
    assert all(are_of_quota[6:]), "the first selection needs some iterations"
