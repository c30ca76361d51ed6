"""FasterMoE: the hottest experts of each micro-batch on all devices (FasterMoE, §4.1).

Shape letters: D devices, E experts.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD, NUM_ALL_TO_ALLS
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.strategies.fastermoe import FastermoeSettings
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import ReplicasAfterGate


@dataclass(frozen=True)
class ShadowingCosts:
    """The quantities from which FasterMoE's model computes latencies, with its one bandwidth for all links.

    The paper's ``H`` is ``token_bytes``. An expert's parameters and its gradient have ``2αH²`` bytes each,
    and its forward pass ``4αH²`` operations for one token. A device has the throughput ``P``, and the network
    the bandwidth ``W_net``.
    """

    token_bytes: float
    expert_bytes: float
    flops_per_token: float
    flops_per_s: float
    bytes_per_s: float

    def of_the_authors(self, num_devices: int) -> "ShadowingCosts":
        """Costs with which these formulas equal the authors' scripts, on D expert-parallel devices.

        ``policy_fn`` of ``plotting/fig11.py`` (github.com/laekov/fastermoe-ae) counts the compute of every
        token four times (with the bytes of a number) and divides the transfers of a shadow by the number of
        devices.
        """
        part_bytes = self.expert_bytes / num_devices
        return replace(self, flops_per_token=4 * self.flops_per_token, expert_bytes=part_bytes)

    def latency_s(self, num_tokens: float, num_shadowed: int, num_exchanged: float) -> float:
        """Seconds of a layer, forward and backward: Eq. 7 without shadows, Eq. 8 without an exchange.

        The tokens are those of the most loaded device, computed, and received in each of four all-to-alls.
        """
        compute_s = (1 + BACKWARD_PER_FORWARD) * num_tokens * self.flops_per_token / self.flops_per_s
        moved_bytes = num_shadowed * (self.expert_bytes + self.expert_bytes)
        exchange_s = NUM_ALL_TO_ALLS * num_exchanged * self.token_bytes / self.bytes_per_s
        return compute_s + moved_bytes / self.bytes_per_s + exchange_s


def select_shadows(
    owner_E: np.ndarray,
    counts_DE: np.ndarray,
    costs: ShadowingCosts,
    *,
    most: int,
    remaining_exchange: bool = False,
) -> tuple[int, ...]:
    """Select at most ``most`` experts to replicate on all devices, in this order (FasterMoE, Alg. 1).

    Experts are tried in descending load. The tokens of a selected expert stay on their devices. The search
    ends at the first expert that does not strictly lower the modelled latency. For a device that owns several
    experts, the sum of their tokens counts. The paper has no limit.

    ``remaining_exchange`` adds to Eq. 8 the all-to-alls of the tokens that still go to owners, computed as in
    Eq. 7. The published Eq. 8 omits them, so its first shadow seems to save the whole dispatch.
    """
    load_E = counts_DE.sum(axis=0)
    tokens_D = np.bincount(owner_E, weights=load_E, minlength=len(counts_DE))
    exchanged_D = tokens_D.copy()
    least_s = costs.latency_s(float(tokens_D.max()), 0, float(tokens_D.max()))
    shadowed: list[int] = []
    for expert in np.argsort(-load_E, kind="stable").tolist()[:most]:
        tokens_D[owner_E[expert]] -= load_E[expert]
        tokens_D += counts_DE[:, expert]
        exchanged_D[owner_E[expert]] -= load_E[expert]
        exchanged = float(exchanged_D.max()) if remaining_exchange else 0.0
        seconds = costs.latency_s(float(tokens_D.max()), len(shadowed) + 1, exchanged)
        if not seconds < least_s:
            break
        least_s = seconds
        shadowed.append(expert)
    return tuple(shadowed)


class FastermoeStrategy(ReplicasAfterGate[FastermoeSettings]):
    """``fastermoe``: replicates shadows on all devices, selected by the exact counts (FasterMoE §4.1)."""

    def exact_plan(self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan) -> LayerPlan:
        """A plan with the shadows of this micro-batch (FasterMoE, Alg. 1)."""
        profile = context.costs
        costs = ShadowingCosts(
            token_bytes=profile.token_bytes,
            expert_bytes=profile.expert_bytes,
            flops_per_token=profile.flops_per_token,
            flops_per_s=profile.cluster.expert_flops_per_s,
            bytes_per_s=1 / profile.slowest_link(context.topology).beta_s_per_byte,
        )
        if self.settings.latency == "authors":
            costs = costs.of_the_authors(context.num_devices)
        shadowed = select_shadows(
            *(context.owner_E, counts_DE, costs),
            most=self.slots(context),
            remaining_exchange=self.settings.latency == "complete",
        )
        if not shadowed:
            return plan
        present_ED = plan.placement.present_ED.copy()
        present_ED[list(shadowed)] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        return self.plan_of(placement, context, each_micro_batch=True)
