"""Pretrains a dense or MoE GPT through ``megatron.training``.

The script takes Megatron's arguments and runs under torchrun, directly or through ``python -m
megatron_fssdp``. It exists because Megatron's wheel contains the training loop, but no script that calls it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_fssdp.pretraining.script_parts import built_datasets, refuse_arguments, refuse_bad_losses

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

# Arguments for other models, and for other kinds of training, which need other batches or losses.
_OFF = ("sft", "fim_data", "hybrid_context_parallel", "dataloader_inter_document_masking")
_SUPPORTED: dict[str, tuple[object, ...]] = {**dict.fromkeys(_OFF, (False,)), "hybrid_layer_pattern": (None,)}


def load_batch(samples: Iterator[dict[str, Any]], vp_stage: int | None) -> dict[str, Any]:
    """Take this rank's part of the next micro-batch, by name; None is what its pipeline stage does not need.

    Only tensor-parallel rank 0 reads the samples. ``vp_stage`` is the index of the model chunk.
    """
    args = get_args()
    predicts_later = _predicts_later_tokens(vp_stage)
    if not (is_first_or_last_pipeline_stage(vp_stage) or predicts_later):
        return dict.fromkeys(_BATCH_KEYS)
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
        mtp_on_this_rank=predicts_later,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    cp_group = parallel_state.get_context_parallel_group()
    return dict(get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group))


def _predicts_later_tokens(vp_stage: int | None) -> bool:
    """Whether a model chunk has layers of multi-token prediction, which need the tokens and the labels."""
    args = get_args()
    return args.mtp_num_layers is not None and mtp_on_this_rank(
        layout=core_transformer_config_from_args(args).pipeline_model_parallel_layout,
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def masked_loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the losses of the tokens that the mask selects; both tensors are ``[batch, sequence]``.

    Returns:
        The sum of the losses, the number of tokens in the sum, and both values for Megatron's log.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    refuse_bad_losses({"loss": loss})
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def forward_step(
    data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Return the model's output for one micro-batch, and the function that computes the loss from it.

    Under ``--overlap-moe-expert-parallel-comm``, Megatron asks for a plan of the forward pass instead of the
    output.
    """
    batch = load_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    run: Any = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(masked_loss, batch["loss_mask"])


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build training, validation and test data, of these numbers of samples, on the ranks that read data."""
    args = get_args()
    return built_datasets(
        MockGPTDataset if args.mock_data else GPTDataset,
        GPTDatasetConfig,
        num_samples,
        is_needed=is_first_or_last_pipeline_stage(vp_stage) or _predicts_later_tokens(vp_stage),
        tokenizer=build_tokenizer(args),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
    )


# Every rank builds data sets, and the builder lets the ranks of a node share the indices.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Pretrain a GPT as the command line describes it."""
    args = parse_and_validate_args()
    refuse_arguments(args, _SUPPORTED, "Megatron-LM's own scripts support it")
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
