"""A journal that every rank of a training writes: owners, contents of experts, and log lines."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fssdp.planning.placement.owner_map import OwnerMap

from .uneven_owners import optimizer_tensors

FOLDER = "OWNER_JOURNAL"

# What Megatron's own layers, by number, keep of each expert: a hash of the weights and Adam's averages.
Contents = dict[str, str]


@dataclass(frozen=True)
class OwnerJournal:
    """The entries of all ranks.

    Attributes:
        owners: Owner map that was in force in an iteration, as plain numbers, by pipeline stage.
        contents: What the experts were when the iteration began, by layer number, expert, and the
            ranks in the expert-tensor and expert-data-parallel groups that share it.
        lines: The plugin's log lines, of all ranks.
    """

    owners: Mapping[int, Mapping[int, Any]]
    contents: Mapping[int, Contents]
    lines: list[str]

    @classmethod
    def read(cls, folder: Path) -> "OwnerJournal":
        """Merge the ranks' files."""
        owners: dict[int, dict[int, Any]] = {}
        contents: dict[int, Contents] = {}
        lines = []
        for path in sorted(folder.glob("*.jsonl")):
            for entry in map(json.loads, path.read_text().splitlines()):
                if "line" in entry:
                    lines.append(entry["line"])
                    continue
                stages = owners.setdefault(entry["iteration"], {})
                assert stages.setdefault(entry["stage"], entry["owners"]) == entry["owners"]
                contents.setdefault(entry["iteration"], {}).update(entry["contents"])
        return cls(owners, contents, lines)


def keep_journal() -> None:
    """On each rank, record the current owners and the experts' contents before every iteration."""
    from megatron.training import training

    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{os.environ['RANK']}.jsonl"

    def write(entry: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    handler = logging.Handler()
    handler.emit = lambda record: write({"line": record.getMessage()})  # type: ignore[method-assign]
    logging.getLogger("megatron_fssdp").addHandler(handler)

    # The plugin wraps this in turn, so that re-sharding is over when it is called.
    step: Callable[..., Any] = training.train_step

    def train_step(forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        write(_entry(optimizer))
        return step(forward, data, model, optimizer, *args, **kwargs)

    training.train_step = train_step


def _entry(optimizer: Any) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.training import get_args

    from megatron_fssdp.megatron_adapter.entry.registration import requested_strategy

    choice = requested_strategy()
    assert choice is not None
    assert choice.session is not None
    slots = choice.session.slots
    owners: OwnerMap = slots.owners
    device = parallel_state.get_expert_model_parallel_rank()
    # Parts of an expert, or of its optimizer state, are told apart.
    tensor_rank = parallel_state.get_expert_tensor_parallel_rank()
    part, contents = f"{tensor_rank}.{parallel_state.get_expert_data_parallel_rank()}", {}
    for slot, parameters in enumerate(slots.parameters):
        layer, expert = owners.expert_in(device, slot)
        tensors = [t for p in parameters for t in (p.data, *optimizer_tensors(optimizer, p))]
        contents[f"{slots.layer_numbers()[layer]}/{expert}/{part}"] = _digest(tensors)
    return {
        "iteration": get_args().curr_iteration + 1,
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "owners": owners.as_lists(),
        "contents": contents,
    }


def _digest(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
