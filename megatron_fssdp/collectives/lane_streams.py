"""The CUDA streams of transfers: one for each kind of use, process group and device.

Torch hands out streams from a pool of 32 and begins again after the last one. A program that asks for a new
stream for each transfer therefore soon gets the streams of its earlier transfers and of other libraries, and
work that could run side by side waits in one of them.
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_Key = tuple[str, torch.device, type[torch.cuda.Stream]]
_streams: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, torch.cuda.Stream]] = WeakKeyDictionary()


def lane_stream(use: str, group: dist.ProcessGroup, device: torch.device) -> torch.cuda.Stream:
    """The stream of one kind of use of a process group on a device; it is created at the first call.

    Args:
        use: Kind of use. Work of different kinds runs side by side.
        group: Process group whose messages the stream carries.
        device: CUDA device of the stream.
    """
    streams = _streams.setdefault(group, {})
    # Tests replace the class by that of a virtual device, whose streams serve that device alone.
    key = (use, device, torch.cuda.Stream)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device)
    return streams[key]
