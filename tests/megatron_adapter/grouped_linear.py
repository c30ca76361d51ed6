"""A stand-in for Transformer Engine's grouped linear layer that supports checkpoints but no computation.

Its state dict has the names of ``TEGroupedLinear``: ``weight0``, ``weight1``, …, ``bias0``, …
and ``_extra_state``, ``_extra_state1``, …; its sharded state dict follows
``TEGroupedLinear._sharded_state_dict_grouped`` of megatron-core 0.19.
"""

import dataclasses
from functools import partial
from typing import Any

import torch


class GroupedLinear(torch.nn.Module):
    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        shard_axis: int,
        bias: bool,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.shard_axis, self.groups = num_gemms, shard_axis, pg_collection
        shape = [output_size, input_size]
        shape[shard_axis] //= pg_collection.expt_tp.size()
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(torch.empty(shape)))
            if bias:
                self.register_parameter(f"bias{index}", torch.nn.Parameter(torch.empty(shape[0])))

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: dict[str, Any]) -> Any:
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        singleton = metadata.get("singleton_local_shards", False)
        parameters = dict(self.named_parameters())
        state = {}
        for index in range(self.num_gemms):
            expert = self.groups.ep.rank() * self.num_gemms + index
            axes = {"weight": self.shard_axis, **({"bias": 0} if self.shard_axis == 0 else {})}
            total = self.groups.ep.size() * self.num_gemms
            offsets = sharded_offsets
            if not singleton:
                offsets = (*sharded_offsets, (len(sharded_offsets), expert, total))
            names = ("weight", "bias") if f"bias{index}" in parameters else ("weight",)
            local = {name: parameters[f"{name}{index}"] for name in names}
            entries = make_sharded_tensors_for_checkpoint(
                {**local, "_extra_state": torch.empty(0, dtype=torch.uint8)},
                "",
                axes,
                offsets,
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(entries, "", f"{expert}.{prefix}" if singleton else prefix)
            for name, entry in entries.items():
                entry.replica_id = (*entry.replica_id[:2], self.groups.expt_dp.rank())
                is_first_extra = name == "_extra_state" and index == 0
                state[f"{prefix}{name}{'' if is_first_extra else index}"] = entry
        return state


def fake_grouped_experts(mlp: Any) -> Any:
    """Submodules of a layer: Megatron's grouped experts with stand-ins for the grouped linear layers."""
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    linears = GroupedMLPSubmodules(
        linear_fc1=partial(GroupedLinear, shard_axis=0), linear_fc2=partial(GroupedLinear, shard_axis=1)
    )
    return dataclasses.replace(
        mlp.keywords["submodules"], experts=partial(TEGroupedMLP, submodules=linears), shared_experts=None
    )
