"""Pro-Prophet's planner: it replicates the most loaded experts on a subset of the devices (Pro-Prophet, §IV).

Shape letters: E experts, D devices.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD, NUM_ALL_TO_ALLS, exposed_s
from megatron_fssdp.planning.loads.checked_loads import checked_counts
from megatron_fssdp.planning.placement.placement import ExpertPlacement


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

    def all_to_all_s(self, received_D: np.ndarray) -> float:
        """Seconds of one all-to-all, ``T_A2A = max_i R_i · size(input) / B̄`` (Eq. 1).

        Args:
            received_D: Inputs that each device receives from other devices, ``R``, ``[D]``.
        """
        return float(received_D.max()) * self.input_bytes / self.bytes_per_s

    def expert_s(self, computed_D: np.ndarray) -> float:
        """Seconds of the experts' forward pass, ``T_FEC = max_i H_i / t`` (Eq. 2).

        The backward pass takes twice as long (Eq. 3).

        Args:
            computed_D: Inputs that each device computes, ``H``, ``[D]``.
        """
        return float(computed_D.max()) / self.inputs_per_s

    def transfer_s(self, num_selected: int, num_bytes: int) -> float:
        """Seconds of the transfer of selected experts or of their gradients.

        With parameters it is ``T_Trans = s · (D − n) · size / (D · B̄)`` (Eq. 4), with gradients ``T_Agg``
        (Eq. 5).

        Args:
            num_selected: Number of selected experts, ``s``.
            num_bytes: Bytes of one expert's parameters or gradients, ``size``.
        """
        share = (self.num_devices - self.num_left_out) / self.num_devices
        bytes_per_s = self.transfer_bytes_per_s or self.bytes_per_s
        return num_selected * (self.start_s + share * num_bytes / bytes_per_s)

    def layer_s(self, received_D: np.ndarray, computed_D: np.ndarray, num_selected: int) -> float:
        """Modelled seconds of the layer: Eq. 6, or Eq. 8 if transfers overlap computation.

        Args:
            received_D: Inputs that each device receives from other devices, ``R``, ``[D]``.
            computed_D: Inputs that each device computes, ``H``, ``[D]``.
            num_selected: Number of selected experts, ``s``.
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


def plan_layer(
    owner_E: np.ndarray,
    counts_DE: np.ndarray,
    model: ProphetModel,
    *,
    balance: float = 0.5,
    slots: int | None = None,
) -> PlannedLayer:
    """Plan one layer by a greedy search (Pro-Prophet, Alg. 1).

    Each step takes the most loaded device, and of its experts the most loaded one that has not been selected
    yet. The expert is sent to all devices except the ``n`` devices that have the fewest inputs for it. Inputs
    on devices that have the expert then stay there. All other inputs go to its owner, as before. The steps
    end when the load is balanced. The result is the sequence of first steps with the fewest modelled seconds,
    or no step if none lowers them.

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        counts_DE: (token, k) pairs of an iteration by source device and expert, integers ``[D, E]``.
        model: The performance model of the layer.
        balance: ``α`` of Eq. 7. The load is balanced if ``max(H) − min(H) < α · I / E``, with ``I`` inputs in
            all.
        slots: Most replicas that a device may hold. None means no limit, as in the paper.

    Returns:
        A placement whose modelled seconds are at most those without replicas.

    Raises:
        ValueError: The counts do not match the owners and devices, or ``balance`` is negative.
    """
    owner = np.asarray(owner_E)
    counts = checked_counts(counts_DE, model.num_devices, len(owner))
    if balance < 0:
        raise ValueError(f"balance is {balance}: wanted 0 or more (Pro-Prophet, Eq. 7)")
    plain = ExpertPlacement.owners_only(owner, model.num_devices)
    load_E = counts.sum(axis=0)
    experts = np.arange(len(owner))
    computed_D = np.bincount(owner, weights=load_E, minlength=model.num_devices)
    own_D = np.bincount(owner, weights=counts[owner, experts], minlength=model.num_devices)
    received_D = computed_D - own_D
    least_s = model.layer_s(received_D, computed_D, 0)
    tolerance = balance * counts.sum() / len(owner)
    sent: list[tuple[int, int]] = []
    num_best = num_sent = 0
    used_E = np.zeros(len(owner), bool)
    left_D = np.full(model.num_devices, len(owner) if slots is None else slots)
    while computed_D.max() - computed_D.min() >= tolerance:
        busiest = int(computed_D.argmax())
        candidates = np.flatnonzero((owner == busiest) & ~used_E & (load_E > 0))
        if not candidates.size:
            break
        expert = int(candidates[load_E[candidates].argmax()])
        used_E[expert] = True
        fewest = np.argsort(counts[:, expert], kind="stable")
        fewest = fewest[fewest != busiest][: model.num_left_out]
        holds_D = left_D > 0
        holds_D[fewest] = holds_D[busiest] = False
        gains_D = np.where(holds_D, counts[:, expert], 0)
        computed_D += gains_D
        computed_D[busiest] -= gains_D.sum()
        received_D[busiest] -= gains_D.sum()
        left_D -= holds_D
        sent += [(expert, device) for device in np.flatnonzero(holds_D).tolist()]
        num_sent += 1
        seconds = model.layer_s(received_D, computed_D, num_sent)
        if seconds < least_s:
            least_s, num_best = seconds, len(sent)
    return PlannedLayer(plain.with_replicas(sent[:num_best], slots=slots), least_s)
