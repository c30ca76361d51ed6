"""Megatron's all-to-all dispatcher, where the host knows already how many rows each rank sends to each slot.

The stock dispatcher gathers the counts of all ranks and waits for them. A plan by the exact counts of a
micro-batch has waited for the same counts, so neither is needed here.

Shape letters: T tokens, W slots of all devices, U slots of a device, S sources.
"""

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_fssdp.planning.dispatch.whole_tokens import KnownSplits


class KnownSplitsDispatcher(MoEAlltoAllTokenDispatcher):
    """The stock dispatcher, but for how it gets the numbers of rows. Set ``splits`` before each pass."""

    splits: KnownSplits

    @staticmethod
    def serves(dispatcher: type, config: object, num_parts: int) -> bool:
        """Whether it may stand in for a class of dispatchers whose experts have ``num_parts`` parts."""
        # The stock one pads the map after the counts are known.
        pads = getattr(config, "moe_router_padding_for_quantization", False)
        return dispatcher is MoEAlltoAllTokenDispatcher and num_parts == 1 and not pads

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Set what the exchange of a map ``[T, W]`` needs; the rows of this device's slots, int64 ``[U]``."""
        sent_D, received_SU = self.splits
        self.num_out_tokens = int(sent_D.sum())
        self.input_splits, self.output_splits = sent_D, received_SU.sum(axis=1)
        self.output_splits_tp = received_SU.sum().reshape(1)
        received = torch.from_numpy(received_SU)
        if self.config.moe_permute_fusion and routing_map.is_cuda:  # Fused sorting reads it on the device.
            received = received.pin_memory().to(routing_map.device, non_blocking=True)
        self.num_global_tokens_per_local_expert = received
        return torch.from_numpy(received_SU.sum(axis=0))
