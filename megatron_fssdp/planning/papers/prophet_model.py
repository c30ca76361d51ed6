"""Pro-Prophet's performance model of one MoE layer (Pro-Prophet, §IV-B).

Shape letters: D devices.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD, NUM_ALL_TO_ALLS


@dataclass(frozen=True)
class ProphetModel:
    """Pro-Prophet's performance model of one MoE layer (§IV-B, Eq. 1 to 6; §V-C, Eq. 8).

    Attributes:
        num_devices: Number of devices, the paper's ``D``.
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
        ValueError: A throughput is not positive.
    """

    num_devices: int
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
        for name in ("bytes_per_s", "inputs_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: wanted a positive throughput")

    def all_to_all_s(self, received_D: np.ndarray) -> np.ndarray:
        """Seconds of one all-to-all, ``T_A2A = max_i R_i · size(input) / B̄`` (Eq. 1).

        Args:
            received_D: Inputs that each device receives from other devices, ``R``, ``[..., D]``.
        """
        return self._exchange_s(received_D.max(axis=-1))

    def expert_s(self, computed_D: np.ndarray) -> np.ndarray:
        """Seconds of the experts' forward pass, ``T_FEC = max_i H_i / t`` (Eq. 2).

        The backward pass takes twice as long (Eq. 3).

        Args:
            computed_D: Inputs that each device computes, ``H``, ``[..., D]``.
        """
        return computed_D.max(axis=-1) / self.inputs_per_s

    def transfer_s(
        self, num_selected: int | np.ndarray, num_bytes: int, num_left_out: int | np.ndarray
    ) -> np.ndarray:
        """Seconds of the transfer of selected experts or of their gradients.

        With parameters it is ``T_Trans = s · (D − n) · size / (D · B̄)`` (Eq. 4), with gradients ``T_Agg``
        (Eq. 5).

        Args:
            num_selected: Number of selected experts, ``s``.
            num_bytes: Bytes of one expert's parameters or gradients, ``size``.
            num_left_out: Number of devices to which a selected expert is not sent, ``n``.
        """
        share = (self.num_devices - num_left_out) / self.num_devices
        bytes_per_s = self.transfer_bytes_per_s or self.bytes_per_s
        return np.asarray(num_selected * (self.start_s + share * num_bytes / bytes_per_s))

    def layer_s(
        self,
        received_D: np.ndarray,
        computed_D: np.ndarray,
        num_selected: int | np.ndarray,
        num_left_out: int | np.ndarray,
    ) -> np.ndarray:
        """Modelled seconds of the layer: Eq. 6, or Eq. 8 if transfers overlap computation.

        Several cases can be modelled at once; each then has an entry of the first axes.

        Args:
            received_D: Inputs that each device receives from other devices, ``R``, ``[..., D]``.
            computed_D: Inputs that each device computes, ``H``, ``[..., D]``.
            num_selected: Number of selected experts, ``s``, ``[...]``.
            num_left_out: Number of devices to which a selected expert is not sent, ``n``, ``[...]``.
        """
        most = received_D.max(axis=-1), computed_D.max(axis=-1)
        return self.step_s(*most, num_selected, num_left_out)

    def step_s(
        self,
        most_received: Any,
        most_computed: Any,
        num_selected: int | np.ndarray,
        num_left_out: int | np.ndarray,
    ) -> np.ndarray:
        """:meth:`layer_s`, from the most inputs that a device receives and computes.

        Args:
            most_received: The most inputs that a device receives from other devices, a number or ``[...]``.
            most_computed: The most inputs that a device computes, a number or ``[...]``.
            num_selected: As in :meth:`layer_s`.
            num_left_out: As in :meth:`layer_s`.
        """
        forward_s = most_computed / self.inputs_per_s
        trans_s = self.transfer_s(num_selected, self.expert_bytes, num_left_out)
        agg_s = self.transfer_s(num_selected, self.gradient_bytes, num_left_out)
        if self.overlaps:
            trans_s = np.maximum(0.0, trans_s - (forward_s + self.non_expert_s))
            agg_s = np.maximum(0.0, agg_s - BACKWARD_PER_FORWARD * (forward_s + self.non_expert_s))
        moved_s = NUM_ALL_TO_ALLS * self._exchange_s(most_received)
        return np.asarray(moved_s + (1 + BACKWARD_PER_FORWARD) * forward_s + trans_s + agg_s)

    def _exchange_s(self, most_received: Any) -> Any:
        return most_received * self.input_bytes / self.bytes_per_s
