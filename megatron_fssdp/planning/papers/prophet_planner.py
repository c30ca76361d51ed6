"""Pro-Prophet's planner: it replicates the most loaded experts on a subset of the devices (Pro-Prophet, §IV).

Shape letters: E experts, D devices.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD, NUM_ALL_TO_ALLS, exposed_s
from megatron_fssdp.planning.kernels import prophet_search
from megatron_fssdp.planning.loads.checked_loads import checked_counts
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.placement import ExpertPlacement

greedy_steps = Kernel(prophet_search.greedy_steps)


@dataclass(frozen=True)
class ProphetModel:
    """Pro-Prophet's performance model of one MoE layer (§IV-B, Eq. 1 to 6; §V-C, Eq. 8).

    Attributes:
        num_devices: Number of devices, the paper's ``D``.
        num_left_out: Number of devices to which a selected expert is not sent, ``n``.
        input_bytes: Bytes of one input (one token's hidden state), ``size(input)``.
        expert_bytes: Bytes of one expert's parameters.
        gradient_bytes: Bytes of one expert's gradients.
        bytes_per_s: Mean bandwidth of a device while all devices exchange inputs, ``B̄``.
        inputs_per_s: Number of inputs for which a device computes the expert's forward pass in a second,
            ``t``.
        non_expert_s: Seconds of the forward pass of the computation between two MoE layers, ``FNEC``. Its
            backward pass takes twice as long.
        overlaps: Whether Trans and Agg run beside computation. Then Eq. 8 is used in place of Eq. 6.
        transfer_bytes_per_s: Bandwidth of Trans and Agg. ``None`` means ``B̄``, as in the paper. This field
            is ours, because a two-level transfer has a node's link for itself.
        start_s: Start-up seconds of each expert's Trans, and of its Agg. The paper has none.

    Raises:
        ValueError: ``num_left_out`` is out of range, or a throughput is not positive.
    """

    num_devices: int
    num_left_out: int
    input_bytes: float
    expert_bytes: int
    gradient_bytes: int
    bytes_per_s: float
    inputs_per_s: float
    non_expert_s: float = 0.0
    overlaps: bool = False
    transfer_bytes_per_s: float | None = None
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.num_left_out < self.num_devices:
            raise ValueError(
                f"num_left_out is {self.num_left_out} of {self.num_devices} devices: wanted 0 up to "
                f"{self.num_devices - 1}"
            )
        for name in ("bytes_per_s", "inputs_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: wanted a positive throughput")

    def all_to_all_s(self, received_D: np.ndarray) -> np.ndarray:
        """Seconds of one all-to-all, ``T_A2A = max_i R_i · size(input) / B̄`` (Eq. 1).

        Args:
            received_D: Inputs that each device receives from other devices, ``R``, ``[..., D]``.
        """
        return received_D.max(axis=-1) * self.input_bytes / self.bytes_per_s

    def expert_s(self, computed_D: np.ndarray) -> np.ndarray:
        """Seconds of the experts' forward pass, ``T_FEC = max_i H_i / t`` (Eq. 2).

        The backward pass takes twice as long (Eq. 3).

        Args:
            computed_D: Inputs that each device computes, ``H``, ``[..., D]``.
        """
        return computed_D.max(axis=-1) / self.inputs_per_s

    def transfer_s(self, num_selected: int | np.ndarray, num_bytes: int) -> np.ndarray:
        """Seconds of the transfer of selected experts or of their gradients.

        With parameters it is ``T_Trans = s · (D − n) · size / (D · B̄)`` (Eq. 4), with gradients ``T_Agg``
        (Eq. 5).

        Args:
            num_selected: Number of selected experts, ``s``.
            num_bytes: Bytes of one expert's parameters or gradients, ``size``.
        """
        share = (self.num_devices - self.num_left_out) / self.num_devices
        bytes_per_s = self.transfer_bytes_per_s or self.bytes_per_s
        return np.asarray(num_selected * (self.start_s + share * num_bytes / bytes_per_s))

    def layer_s(
        self, received_D: np.ndarray, computed_D: np.ndarray, num_selected: int | np.ndarray
    ) -> np.ndarray:
        """Modelled seconds of the layer: Eq. 6, or Eq. 8 if transfers overlap computation.

        Several cases can be modelled at once; each then has an entry of the first axes.

        Args:
            received_D: Inputs that each device receives from other devices, ``R``, ``[..., D]``.
            computed_D: Inputs that each device computes, ``H``, ``[..., D]``.
            num_selected: Number of selected experts, ``s``, ``[...]``.
        """
        forward_s = self.expert_s(computed_D)
        trans_s = self.transfer_s(num_selected, self.expert_bytes)
        agg_s = self.transfer_s(num_selected, self.gradient_bytes)
        if self.overlaps:
            trans_s = exposed_s(trans_s, forward_s + self.non_expert_s)
            agg_s = exposed_s(agg_s, BACKWARD_PER_FORWARD * (forward_s + self.non_expert_s))
        moved_s = NUM_ALL_TO_ALLS * self.all_to_all_s(received_D)
        return moved_s + (1 + BACKWARD_PER_FORWARD) * forward_s + trans_s + agg_s


@dataclass(frozen=True, eq=False)
class PlannedLayer:
    """Result of the search.

    Attributes:
        placement: Owners and replicas of the experts.
        seconds: Modelled seconds of the layer with the counts from which the placement was planned.
    """

    placement: ExpertPlacement
    seconds: float


class ProphetLayer:
    """One layer for which the greedy search runs, once or with several models (Pro-Prophet, Alg. 1).

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        counts_DE: (token, k) pairs of an iteration by source device and expert, integers ``[D, E]``.
        num_devices: Number of devices, D.

    Raises:
        ValueError: The counts do not match the owners and devices.
    """

    def __init__(self, owner_E: np.ndarray, counts_DE: np.ndarray, num_devices: int) -> None:
        self._owner_E = owner = np.ascontiguousarray(owner_E, np.int64)
        self._counts_DE = counts = checked_counts(counts_DE, num_devices, len(owner))
        self._plain = ExpertPlacement.owners_only(owner, num_devices)
        self._load_E = counts.sum(axis=0)
        self._total = int(self._load_E.sum())
        self._computed_D, own_D = (
            np.bincount(owner, weights=tokens_E, minlength=num_devices).astype(np.int64)
            for tokens_E in (self._load_E, counts[owner, np.arange(len(owner))])
        )
        self._received_D = self._computed_D - own_D

    def plan(self, model: ProphetModel, *, balance: float = 0.5, slots: int | None = None) -> PlannedLayer:
        """Plan the layer by the greedy search.

        Each step takes the most loaded device, and of its experts the most loaded one that has not been
        selected yet. The expert is sent to all devices except the ``n`` devices that have the fewest inputs
        for it. Inputs on devices that have the expert then stay there. All other inputs go to its owner, as
        before. The steps end when the load is balanced. The result is the sequence of first steps with the
        fewest modelled seconds, or no step if none lowers them.

        Args:
            model: The performance model of the layer.
            balance: ``α`` of Eq. 7. The load is balanced if ``max(H) − min(H) < α · I / E``, with ``I``
                inputs in all.
            slots: Most replicas that a device may hold. None means no limit, as in the paper.

        Returns:
            A placement whose modelled seconds are at most those without replicas.

        Raises:
            ValueError: The model has another number of devices, or ``balance`` is negative.
        """
        owner, counts, plain = self._owner_E, self._counts_DE, self._plain
        if model.num_devices != plain.num_devices:
            raise ValueError(
                f"the model has {model.num_devices} devices: wanted the {plain.num_devices} devices of the "
                "layer"
            )
        if balance < 0:
            raise ValueError(f"balance is {balance}: wanted 0 or more (Pro-Prophet, Eq. 7)")
        computed_D, received_D = self._computed_D.copy(), self._received_D.copy()
        plain_s = float(model.layer_s(received_D, computed_D, 0))
        left_D = np.full(model.num_devices, len(owner) if slots is None else slots, np.int64)
        end_E, most_received_E, most_computed_E = np.empty((3, len(owner)), np.int64)
        expert_P, device_P = np.empty((2, counts.size), np.int64)
        num_steps = greedy_steps(
            owner,
            self._load_E,
            counts,
            model.num_left_out,
            balance * self._total / len(owner),
            left_D,
            computed_D,
            received_D,
            end_E,
            most_received_E,
            most_computed_E,
            expert_P,
            device_P,
        )
        if not num_steps:
            return PlannedLayer(plain, plain_s)
        step_s = model.layer_s(
            most_received_E[:num_steps, None], most_computed_E[:num_steps, None], np.arange(1, num_steps + 1)
        )
        best = int(step_s.argmin())
        if step_s[best] >= plain_s:
            return PlannedLayer(plain, plain_s)
        present_ED = plain.present_ED.copy()
        present_ED[expert_P[: end_E[best]], device_P[: end_E[best]]] = True
        return PlannedLayer(ExpertPlacement(owner, present_ED, slots=slots), float(step_s[best]))


def plan_layer(
    owner_E: np.ndarray,
    counts_DE: np.ndarray,
    model: ProphetModel,
    *,
    balance: float = 0.5,
    slots: int | None = None,
) -> PlannedLayer:
    """Plan one layer by a greedy search with one model (:meth:`ProphetLayer.plan`).

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        counts_DE: (token, k) pairs of an iteration by source device and expert, integers ``[D, E]``.
        model: The performance model of the layer.
        balance: ``α`` of Eq. 7.
        slots: Most replicas that a device may hold. None means no limit, as in the paper.

    Raises:
        ValueError: The counts do not match the owners and devices, or ``balance`` is negative.
    """
    return ProphetLayer(owner_E, counts_DE, model.num_devices).plan(model, balance=balance, slots=slots)
