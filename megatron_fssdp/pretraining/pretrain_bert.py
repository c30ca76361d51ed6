"""Pretrains a dense or MoE BERT through ``megatron.training``, on masked words and the order of sentences.

The script takes Megatron's arguments and runs under torchrun, directly or through ``python -m
megatron_fssdp``. It uses this package for two things that Megatron's BERT does not have: layers with experts,
and a tokenizer that is read from a local file.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from torch.nn.functional import cross_entropy

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.layer.bert_layers import with_experts
from megatron_fssdp.pretraining.script_parts import built_datasets, refuse_arguments, refuse_bad_losses

_BATCH_KEYS = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask")

_SUPPORTED: dict[str, tuple[object, ...]] = {
    "context_parallel_size": (1,),
    "position_embedding_type": ("learned_absolute", "rope"),
    "rotary_base": (10000,),
    **dict.fromkeys(("mock_data", "qk_layernorm", "calculate_per_token_loss"), (False,)),
    **dict.fromkeys(("spec", "mtp_num_layers"), (None,)),
    "multi_latent_attention": (False,),
}
"""The values of arguments of which BertModel or its data set would silently ignore all others."""


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> BertModel:
    """Build this rank's part of the model. Megatron calls this function for every model chunk."""
    args = get_args()
    config = core_transformer_config_from_args(args) if config is None else config
    layers = with_experts(stock_spec(args.transformer_impl == "transformer_engine"), config)
    return BertModel(
        config=config,
        num_tokentypes=2 if args.bert_binary_head else 0,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        add_binary_head=args.bert_binary_head,
        vp_stage=vp_stage,
    )


def stock_spec(use_transformer_engine: bool) -> ModuleSpec:
    """Return Megatron's own spec of a dense BERT layer; Transformer Engine must be installed for its own."""
    if not use_transformer_engine:
        return bert_layer_specs.bert_layer_local_spec
    if not HAVE_TE:
        raise ConfigurationError(
            "BERT: got Megatron's Transformer Engine spec, but Transformer Engine is not installed; wanted "
            "the local spec: add --transformer-impl local, or install Transformer Engine"
        )
    return bert_layer_specs.get_bert_layer_with_transformer_engine_spec()


def masked_loss(
    batch: dict[str, torch.Tensor], output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the mean loss of the masked words plus the loss of the sentences' order.

    Args:
        batch: The micro-batch, int64 ``[batch, sequence]``, and ``is_random``, int64 ``[batch]``.
        output: The model's loss at every token, ``[batch, sequence]``, and its logits of the sentences'
            order, ``[batch, 2]``. The logits are None if the model does not have this head.

    Returns:
        The sum of both losses, and each loss with a count of 1 micro-batch, for Megatron's log.
    """
    token_loss, order_logits = output
    mask = batch["loss_mask"].reshape(-1).float()
    # A micro-batch of very short texts can have no masked word.
    words = torch.sum(token_loss.reshape(-1).float() * mask) / mask.sum().clamp(min=1)
    parts = {"lm loss": words}
    if order_logits is not None:
        parts["sop loss"] = cross_entropy(order_logits.view(-1, 2).float(), batch["is_random"].view(-1))
    refuse_bad_losses(parts)
    count = torch.ones_like(words)
    return sum(parts.values(), torch.zeros_like(words)), {
        name: torch.stack([part.detach(), count]) for name, part in parts.items()
    }


def forward_step(
    data_iterator: Iterator[dict[str, Any]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """Run the model on one micro-batch. Megatron's schedules call this function.

    Every pipeline stage needs the batch for its attention mask. Only tensor-parallel rank 0 has samples.
    """
    sample = next(data_iterator) if data_iterator is not None else None
    batch = tensor_parallel.broadcast_data(list(_BATCH_KEYS), sample, torch.int64)
    output = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"] if get_args().bert_binary_head else None,
        lm_labels=batch["labels"],
    )
    return output, partial(masked_loss, batch)


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build training, validation and test data of these sizes, masked as by Megatron-LM's script."""
    args = get_args()
    if args.tokenizer_type == "NullTokenizer":
        # Masking needs only the words. Megatron's own tokenizer types need the package transformers.
        from megatron_fssdp.data.tokenizer import WordPieceTokenizer  # needs the package tokenizers

        tokenizer: Any = WordPieceTokenizer.load(Path(args.tokenizer_model))
    else:
        tokenizer = build_tokenizer(args)
    return built_datasets(
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
        num_samples,
        tokenizer=tokenizer,
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
    )


# Every rank builds data sets, and the builder lets the ranks of a node share the indices.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Pretrain a BERT as the command line describes it."""
    args = parse_and_validate_args()
    refuse_arguments(args, _SUPPORTED, "Megatron's BERT, which this script trains, supports nothing else")
    if args.tokenizer_type == "NullTokenizer" and args.tokenizer_model is None:
        raise SystemExit(
            "--tokenizer-type NullTokenizer: got no --tokenizer-model, wanted the folder that "
            "`megatron-fssdp data build --tokenizer wordpiece` wrote, or another tokenizer type"
        )
    config = pretrain_cfg_container_from_args(args)
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step, build_model)


if __name__ == "__main__":
    main()
