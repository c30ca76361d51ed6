"""Systems of others that plan every micro-batch after its gate: UltraEP, MoonEP and LLEP.

In all, tokens wait for the weights of replicas, and gradients travel home beside the backward pass. Assumed
of all: weights travel in the trees of this project, and replicas stay until the backward pass.

Shape letters: D devices, E experts.
"""

from abc import abstractmethod

import numpy as np

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_settings import SlotKeys
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.simulation.systems.spill_planners import equal_rows, least_loaded, quotas_in_nodes
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import ReplicasAfterGate


class UltraepKeys(SlotKeys):
    """Keys of ``ultraep-like``."""

    slots: int | None = setting(
        2, "Redundant experts of a layer on a device, by default as in its tests.", ge=0
    )


class ExactCounts(ReplicasAfterGate[SlotKeys]):
    """Divides the pairs of every micro-batch among the devices, whatever that costs."""

    @abstractmethod
    def tokens_ED(self, context: LayerContext, counts_DE: np.ndarray) -> np.ndarray:
        """Pairs of each expert that each device computes, int64 ``[E, D]``."""

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The plan for the counts of this micro-batch."""
        tokens_ED = self.tokens_ED(context, counts_DE)
        placement = ExpertPlacement(context.owner_E, plan.placement.present_ED | (tokens_ED > 0))
        return self.plan_of(placement, context, each_micro_batch=True, tokens_ED=tokens_ED)


class UltraepSystem(ExactCounts):
    """Lowest ceiling of loads, replicas in the owner's node (arXiv 2606.04101, Dots-Infra/UltraEP).

    Assumed: a node is an NVLink domain; the second search of its kernel, for slots that are scarce, has no
    least number of pairs of a replica (1,024 there).
    """

    def tokens_ED(self, context: LayerContext, counts_DE: np.ndarray) -> np.ndarray:
        """Pairs of each expert that each device computes, int64 ``[E, D]``."""
        layer = context.owner_E, counts_DE.sum(axis=0), context.topology
        return quotas_in_nodes(*layer, slots=self.slots(context))


class MoonepSystem(ExactCounts):
    """Equal rows on all devices, however skewed the routing is (github.com/MoonshotAI/MoonEP).

    Assumed: planning, whose overhead it calls negligible, takes no time; replicas may cross nodes.
    """

    def tokens_ED(self, context: LayerContext, counts_DE: np.ndarray) -> np.ndarray:
        """Pairs of each expert that each device computes, int64 ``[E, D]``."""
        return equal_rows(context.owner_E, counts_DE.sum(axis=0), context.num_devices)


class LlepSystem(ExactCounts):
    """Least-loaded expert parallelism (arXiv 2601.17111, SalesforceAIResearch/LeastLoadedEP).

    λ, α and m are those of the example in its README. Assumed: planning takes no time.
    """

    def tokens_ED(self, context: LayerContext, counts_DE: np.ndarray) -> np.ndarray:
        """Pairs of each expert that each device computes, int64 ``[E, D]``."""
        layer = context.owner_E, counts_DE.sum(axis=0), context.num_devices
        return least_loaded(*layer, threshold=1.3, factor=1.0, fewest=1024)
