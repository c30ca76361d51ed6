"""Computes the points of simulated strategies in the DDL-Roofline (FasterMoE, §3.3)."""

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.simulation.ddl_roofline import RooflinePoint
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import StrategyOutcome

_OF_LAYERS = ("experts", "all-to-all", "waiting for spAG", "waiting for spRS")


def roofline_point(outcome: StrategyOutcome, job: MoeJob) -> RooflinePoint:
    """Return a strategy's point: the mean of its MoE layers over iterations.

    Communication consists of all-to-alls, counts, and the exposed part of spAG and spRS. The part of spAG and
    spRS that is hidden under compute outside the layers does not count.

    Args:
        outcome: Result of simulating the strategy.
        job: Training job that was simulated.

    Raises:
        ValueError: The layers do not communicate.
    """
    parts_s = {part: float(outcome.parts_s[part].mean()) for part in _OF_LAYERS}
    tokens = float(outcome.ledger.tokens_ILD.sum(axis=(1, 2)).mean())
    waiting_s = parts_s["waiting for spAG"] + parts_s["waiting for spRS"]
    return RooflinePoint(
        compute_s=parts_s["experts"],
        communication_s=job.num_micro_batches * float(outcome.layers.exchange_s().sum(axis=1).mean())
        + waiting_s,
        end_to_end_s=sum(parts_s.values()),
        total_flops=(1 + BACKWARD_PER_FORWARD) * job.expert_flops_per_token * tokens,
        num_devices=job.num_devices,
    )
