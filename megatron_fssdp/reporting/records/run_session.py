"""What one start of a training records about itself: its strategy, its length and its host."""

from dataclasses import dataclass

from megatron_fssdp.config.json_records import Count


@dataclass(frozen=True)
class RunSession:
    """One start of a training. A resumed run has one session for each start.

    Attributes:
        strategy: Name of the strategy.
        iterations: Number of iterations that the run was asked to train, those before its start included.
        ranks: Number of ranks on the host that has the fewest cores per rank.
        cores: Number of cores that these ranks can use. 0 if ranks compute on GPUs.
        devices: Number of ranks of the whole run, each with a device of its own. 0 if it was not recorded.
        device: Name of the GPU of global rank 0. Empty if ranks compute on CPUs.
        precision: Data type of parameters and compute: fp32, bf16 or fp16. Empty if it was not recorded.
    """

    strategy: str
    iterations: Count
    ranks: Count = 0
    cores: Count = 0
    devices: Count = 0
    device: str = ""
    precision: str = ""

    @property
    def shared_cores(self) -> str:
        """Statement that ranks share cores, such as ``4 ranks share 2 cores``. Empty if they do not.

        With fewer cores than ranks, a rank with little work lends its core to a busy one. Then balanced loads
        save no time, and the speed says nothing about a machine where every rank has a device of its own.
        """
        if not 0 < self.cores < self.ranks:
            return ""
        return f"{self.ranks} ranks share {self.cores} core{'s' if self.cores > 1 else ''}"
