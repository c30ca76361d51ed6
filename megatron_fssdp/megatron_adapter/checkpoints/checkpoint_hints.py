"""Hints: plain values in a checkpoint's common state with which a run continues as before.

A checkpoint can be loaded without its hints, under any strategy and in stock Megatron, which ignores them.
All ranks save the same values.
"""

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any, Protocol


class CheckpointHint(Protocol):
    """A value that is saved in checkpoints and used when a run resumes."""

    @property
    def key(self) -> str:
        """Name of the value in the checkpoint's common state."""
        ...

    def gather(self) -> Any:
        """Return the value to save, or ``None`` to save nothing. Collective: every rank calls it."""
        ...

    def take(self, hint: Any, metadata: Mapping[str, Any]) -> None:
        """Continue with a checkpoint's value, or log one line why it is not used. Every rank calls it.

        Args:
            hint: The value in the checkpoint. It may be damaged or come from another layout.
            metadata: Megatron's content metadata of the checkpoint.
        """
        ...


def wrap_checkpointing(checkpointing: Any, hints: Sequence[CheckpointHint]) -> None:
    """Wrap Megatron's functions that save and load the common state of a checkpoint.

    Args:
        checkpointing: The module ``megatron.training.checkpointing``. It looks up both functions at call
            time.
        hints: Values to save and to load.
    """
    generate = checkpointing.generate_state_dict

    @wraps(generate)
    def generate_state_dict(args: Any, *rest: Any, **kwargs: Any) -> Any:
        state = generate(args, *rest, **kwargs)
        # Megatron passes the iteration only when it saves. In other formats than torch_dist, some ranks do
        # not come here, so the hints could not be gathered.
        if kwargs.get("iteration") is not None and args.ckpt_format == "torch_dist":
            for hint in hints:
                if (value := hint.gather()) is not None:
                    state[hint.key] = value
        return state

    checkpointing.generate_state_dict = generate_state_dict

    # load_checkpoint reads the common state, calls this function with it, and then builds the sharded state
    # dict into which it loads. No other function of Megatron calls it.
    dist_checkpointing = checkpointing.dist_checkpointing
    load_metadata = dist_checkpointing.load_content_metadata

    @wraps(load_metadata)
    def load_content_metadata(*args: Any, **kwargs: Any) -> Any:
        metadata = load_metadata(*args, **kwargs)
        common = kwargs.get("preloaded_state_dict") or {}
        for hint in hints:
            if hint.key in common:
                hint.take(common[hint.key], metadata or {})
        return metadata

    dist_checkpointing.load_content_metadata = load_content_metadata
