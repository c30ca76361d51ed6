"""One small all-gather in an iteration: the counts of all layers, and a digest of the plans, from all ranks.

The gather starts after the last backward pass, and its results are used when the optimizer has stepped. On
CUDA, a second stream copies them to pinned memory, so the host waits for nothing: by then the device has long
computed the norm of the gradients, for which the optimizer waits anyway.
"""

import hashlib
from collections.abc import Sequence

import torch

from megatron_fssdp.collectives.gathered_counts import CountsOnTheWay, start_counts
from megatron_fssdp.collectives.messages import wait_for
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer

_DIGEST_NUMBERS = 1


class SharedCounts:
    """The numbers of the layers of one group of ranks on their way to all of them.

    Args:
        layers: Layers that share process groups, in the same order on all ranks.
    """

    def __init__(self, layers: Sequence[SlotLayer]) -> None:
        self._layers = layers
        groups = layers[0].groups
        self._group = groups.everyone or groups.expert_parallel
        numbers = [layer.counted() for layer in layers]
        self._lengths = [0 if one is None else len(one) for one in numbers]
        digest = hashlib.blake2b(digest_size=8)
        for layer in layers:
            digest.update(b"" if layer.plan is None else layer.plan.digest())
        device = layers[0].experts.device
        own = torch.tensor([int.from_bytes(digest.digest(), "little", signed=True)])
        if device.type == "cuda":  # From other memory, the host would wait for the copy.
            own = own.pin_memory().to(device, non_blocking=True)
        self._gathered: CountsOnTheWay = start_counts(
            torch.cat([own, *(one for one in numbers if one is not None)]), self._group
        )

    def drop(self) -> None:
        """Give the numbers up. Messages on the CPU must end first, or gloo cannot go on."""
        wait_for(self._gathered.works)

    def take(self) -> None:
        """Give every layer the numbers of all ranks.

        Raises:
            RuntimeError: The ranks have not made the same plans.
        """
        numbers_SN = self._gathered.wait()[0].numpy()
        digest_S = numbers_SN[:, 0]
        if (digest_S != digest_S[0]).any():
            differing = [rank for rank, digest in enumerate(digest_S.tolist()) if digest != digest_S[0]]
            clock = self._layers[0].clock
            raise RuntimeError(
                f"[fssdp] plans of iteration {clock.iteration}: got other plans on ranks {differing} of "
                f"{len(digest_S)} than on rank 0 (this is rank {self._group.rank()}), wanted the same on "
                "all; run again with FSSDP_CHECK_PLANS=1 to find the layer, and look for loads, settings or "
                "random numbers that differ between ranks"
            )
        begin = _DIGEST_NUMBERS
        for layer, length in zip(self._layers, self._lengths, strict=True):
            if length:
                layer.take_counts(numbers_SN[:, begin : begin + length])
            begin += length
