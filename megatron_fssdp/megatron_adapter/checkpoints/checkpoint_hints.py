"""Plain values in a checkpoint's common state, with which a run goes on as it was.

A checkpoint loads without them, under any strategy and in stock Megatron, which ignores them. They are
the same on all ranks.
"""

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any, Protocol


class CheckpointHint(Protocol):
    """One of these values."""

    @property
    def key(self) -> str:
        """Its name in the common state."""
        ...

    def gather(self) -> Any:
        """What goes into a checkpoint; every rank calls it. ``None`` for nothing."""
        ...

    def take(self, hint: Any, metadata: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint has, or say in one log line why not; every rank calls it.

        Args:
            hint: What :meth:`gather` gave when it was saved, not trusted.
            metadata: Megatron's content metadata of the checkpoint.
        """
        ...


def wrap_checkpointing(checkpointing: Any, hints: Sequence[CheckpointHint]) -> None:
    """Wrap the functions by which Megatron's checkpoints get and give their common state.

    Args:
        checkpointing: The module ``megatron.training.checkpointing``; it looks both functions
            up at call time.
        hints: What is to be kept.
    """
    generate = checkpointing.generate_state_dict

    @wraps(generate)
    def generate_state_dict(args: Any, *rest: Any, **kwargs: Any) -> Any:
        state = generate(args, *rest, **kwargs)
        # Only a save has an iteration. The other formats are written by some of the ranks.
        if kwargs.get("iteration") is not None and args.ckpt_format == "torch_dist":
            for hint in hints:
                if (value := hint.gather()) is not None:
                    state[hint.key] = value
        return state

    checkpointing.generate_state_dict = generate_state_dict

    # load_checkpoint hands the common state to this one function between reading it and
    # building the sharded state dict to load into; nobody else calls it.
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
