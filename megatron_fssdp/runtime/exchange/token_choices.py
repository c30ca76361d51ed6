"""The choices that travel with a token: the experts that it selected, and the devices that compute them.

Shape letters: T tokens, K choices per token, A rows that a rank sends before they are deduplicated (pairs of
token and selected expert), P pairs of expert and device, R rows that a rank receives (for its experts),
S ranks that send rows, G experts present on a device, E experts, D devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_fssdp.planning.placement.holder_groups import SourceRow
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.gathered_choices import gathered_devices
from megatron_fssdp.runtime.exchange.selected_pairs import SelectedPairs
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord

NO_CHOICE = -1


def on_device(numbers: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Copy numbers to a device as int64; the host does not wait for the device."""
    return torch.from_numpy(np.array(numbers, np.int64)).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Choices:
    """The experts that tokens selected, and the devices that compute them.

    Attributes:
        codes: For each choice of each token ``device * E + expert``, or ``NO_CHOICE``; int32 ``[T, K]``.
        num_experts: Number of experts of the layer, E.
    """

    codes: Tensor
    num_experts: int

    @classmethod
    def of(
        cls,
        record: DispatchRecord,
        placement: ExpertPlacement,
        topology: Topology,
        most_choices: int | None,
    ) -> "Choices":
        """The choices of this rank's tokens, when it is known where its rows go.

        Args:
            record: Ranks to which the rows of this rank go.
            placement: Owners and replicas of the experts.
            topology: Nodes of the devices.
            most_choices: Largest number of experts that a token selects; ``None`` if it is not known.
        """
        assignment, num_experts = record.assignment_A, placement.num_experts
        sends_D = on_device(record.send_D, assignment.device)
        device_A = torch.repeat_interleave(sends_D, output_size=len(assignment))
        if placement.num_replicas:
            device_A = _gathered(
                record.token_A, assignment, device_A, topology, record.num_tokens, num_experts
            )
        return cls._of_pairs(assignment, device_A, record.num_tokens, num_experts, most_choices)

    @classmethod
    def before_counts(
        cls,
        selected: SelectedPairs,
        load_E: Tensor,
        row: SourceRow,
        topology: Topology,
        most_choices: int | None,
    ) -> "Choices":
        """The choices of this rank's tokens under even dispatch, from the counts of this rank alone.

        The host does not wait for the device. The split is that of ``even_row`` (``kernels/even_split.py``).

        Args:
            selected: Pairs of token and selected expert of this rank.
            load_E: Counts of this rank, int64 ``[E]``.
            row: Holders that receive this rank's tokens.
            topology: Nodes of the devices.
            most_choices: Largest number of experts that a token selects; ``None`` if it is not known.
        """
        device = load_E.device
        num_chosen_E, expert_P, device_P, turn_P = (
            on_device(array, device) for array in (row.num_chosen_E, row.expert_P, row.device_P, row.turn_P)
        )
        share_E = torch.div(load_E, num_chosen_E, rounding_mode="floor")
        rest_E = load_E - share_E * num_chosen_E
        tokens_P = share_E[expert_P] + (turn_P < rest_E[expert_P])
        position = torch.arange(len(selected.ones), device=device)
        chunk = torch.searchsorted(tokens_P.cumsum(0), position, right=True)
        # Positions after the last pair have no device.
        device_A = torch.cat([device_P, device_P.new_full((1,), NO_CHOICE)])[chunk]
        (token, assignment), num_experts = selected.token_and_assignment, len(load_E)
        if row.num_chosen_E.max() > 1:
            device_A = _gathered(token, assignment, device_A, topology, selected.num_tokens, num_experts)
        return cls._of_pairs(assignment, device_A, selected.num_tokens, num_experts, most_choices)

    @classmethod
    def _of_pairs(
        cls,
        assignment_A: Tensor,
        device_A: Tensor,
        num_tokens: int,
        num_experts: int,
        most_choices: int | None,
    ) -> "Choices":
        """Choices from the index of each pair in the flattened ``[T, E]`` routing map and from its device.

        Pairs whose device is ``NO_CHOICE`` are left out.
        """
        size = num_tokens * num_experts
        # Pairs that are left out write to one extra place at the end.
        place = torch.where(device_A == NO_CHOICE, size, assignment_A)
        codes = (device_A * num_experts + assignment_A % num_experts).int()
        table = codes.new_full((size + 1,), NO_CHOICE).scatter_(0, place, codes)
        table = table[:size].view(num_tokens, num_experts)
        if most_choices is None or most_choices >= num_experts:
            return cls(table, num_experts)
        is_chosen = table != NO_CHOICE
        slot = torch.where(is_chosen, is_chosen.cumsum(dim=1) - 1, most_choices)
        narrow = table.new_full((num_tokens, most_choices + 1), NO_CHOICE)
        return cls(narrow.scatter_(1, slot, table)[:, :most_choices].contiguous(), num_experts)

    @property
    def device(self) -> Tensor:
        """Device that computes each choice, int64 ``[T, K]``; negative where there is no choice."""
        return torch.div(self.codes, self.num_experts, rounding_mode="floor").long()

    def hits(self, number_of_device: Sequence[int]) -> Tensor:
        """Whether a token has a choice on each node or device, bool ``[T, numbers]``.

        Args:
            number_of_device: Number of the node or of the device for each device, ``[D]``.
        """
        codes, numbers = self.codes, max(number_of_device) + 1
        # The last entry of the table stands for "no choice", whose device is -1.
        table = on_device([*number_of_device, numbers], codes.device)
        hit = torch.zeros(len(codes), numbers + 1, dtype=torch.bool, device=codes.device)
        return hit.scatter_(1, table[self.device], True)[:, :numbers]

    def probabilities(self, probs: Tensor) -> Tensor:
        """Probability of each choice, ``[T, K]``; 0 where there is no choice.

        Args:
            probs: Routing probabilities, ``[T, E]``.
        """
        is_chosen = self.codes != NO_CHOICE
        expert = torch.where(is_chosen, self.codes % self.num_experts, 0).long()
        return torch.where(is_chosen, probs.gather(1, expert), 0)

    def pairs_here(
        self, device: int, expert_G: np.ndarray, source_S: np.ndarray, rows_S: np.ndarray, num_pairs: int
    ) -> Tensor:
        """Choices that a device computes, by expert, source and token, as positions in ``[T * K]``.

        Args:
            device: The device.
            expert_G: Experts on the device, ascending, integers ``[G]``.
            source_S: Sources of the rows in the order of arrival, integers ``[S]``.
            rows_S: Number of rows of each of these sources, ``[S]``.
            num_pairs: Number of choices that the device computes, R.

        Returns:
            Positions, int64 ``[R]``.
        """
        codes, num_present = self.codes, len(expert_G)
        place_E = np.zeros(self.num_experts, np.int64)
        place_E[expert_G] = np.arange(num_present)
        place = on_device(place_E, codes.device)[(codes % self.num_experts).long()]
        sizes = on_device(rows_S, codes.device)
        sources = on_device(source_S, codes.device)
        source = sources.repeat_interleave(sizes, output_size=len(codes))
        key = torch.where(
            self.device == device,
            place * len(source_S) + source.unsqueeze(1),
            num_present * len(source_S),
        )
        return torch.sort(key.reshape(-1), stable=True).indices[:num_pairs]


def _gathered(
    token_A: Tensor,
    assignment_A: Tensor,
    device_A: Tensor,
    topology: Topology,
    num_tokens: int,
    num_experts: int,
) -> Tensor:
    """:func:`gathered_devices` of pairs that are given by their index in the ``[T, E]`` routing map."""
    node_D = on_device(topology.node_of_device, device_A.device)
    return gathered_devices(token_A, assignment_A % num_experts, device_A, node_D, num_tokens, num_experts)
