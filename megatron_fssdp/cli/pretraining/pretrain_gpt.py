"""Pretrains a GPT, dense or MoE, through ``megatron.training``.

A pretraining script like any other: it takes Megatron's arguments, knows nothing of
this package and runs under torchrun, alone or through ``python -m megatron_fssdp``.
Megatron's wheel ships the training loop, but no script that calls it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

# Other ways to train that need their own batches or losses.
_UNSUPPORTED = (
    "sft",
    "fim_data",
    "hybrid_context_parallel",
    "mtp_num_layers",
    "dataloader_inter_document_masking",
)


def load_batch(samples: Iterator[dict[str, Any]], vp_stage: int | None) -> dict[str, Any]:
    """Take the next micro-batch and cut it for this rank.

    Args:
        samples: The data iterator; only read on tensor rank 0.
        vp_stage: Model chunk under interleaved pipelining.

    Returns:
        The batch's tensors, None where this pipeline stage has no use for them.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(_BATCH_KEYS)
    args = get_args()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        sample = next(samples)
        batch = {key: sample[key].cuda(non_blocking=True) if key in sample else None for key in _BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    cp_group = parallel_state.get_context_parallel_group()
    return dict(get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group))


def masked_loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the token losses that count.

    Args:
        loss_mask: 1 where a token counts.
        output: The model's loss at every token.

    Returns:
        The sum, the number of tokens in it, and both for Megatron's log.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for is_bad, name in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"the loss of a micro-batch is {name}",
                tolerance=0.0,
                fatal=True,
            )
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def forward_step(data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run the model on one micro-batch; Megatron's schedules call it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = load_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(masked_loss, batch["loss_mask"])


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Settings of the data, from Megatron's arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
    )


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build training, validation and test data, where this rank reads any.

    Args:
        num_samples: Samples needed of each.
        vp_stage: Model chunk under interleaved pipelining.

    Returns:
        The three data sets.
    """
    args = get_args()

    def reads_data() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(
            vp_stage
        )

    kind = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(kind, num_samples, reads_data, dataset_config(args))
    training, validation, test = builder.build()
    return training, validation, test


# Every rank asks for data sets, and the builder lets the ranks of a node share the indices.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Pretrain as the command line says."""
    args = parse_and_validate_args()
    for name in _UNSUPPORTED:
        if getattr(args, name, None):
            flag = f"--{name.replace('_', '-')}"
            raise SystemExit(f"{flag} is not served by this script; use Megatron-LM's own pretrain_gpt.py")
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
