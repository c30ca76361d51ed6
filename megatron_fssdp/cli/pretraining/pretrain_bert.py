"""Pretrains a BERT, dense or MoE, through ``megatron.training``: masked words and the order of sentences.

A pretraining script like any other: it takes Megatron's arguments and runs under torchrun, alone or through
``python -m megatron_fssdp``. Of this package it takes what Megatron's BERT lacks: layers with experts, and a
tokenizer that is a file with words.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split
from torch.nn.functional import cross_entropy

from megatron_fssdp.data.wordpiece import WordPieceTokenizer
from megatron_fssdp.megatron_adapter.layer.bert_layers import stock_spec, with_experts

_BATCH_KEYS = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask")

# What BertModel or its data set has no notion of, and would leave out without a word.
_UNSUPPORTED = (
    "mock_data",
    "spec",
    "qk_layernorm",
    "mtp_num_layers",
    "calculate_per_token_loss",
    "multi_latent_attention",
)

_ONLY: dict[str, tuple[object, ...]] = {
    "context_parallel_size": (1,),
    "position_embedding_type": ("learned_absolute", "rope"),
    "rotary_base": (10000,),
}


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> BertModel:
    """Build this rank's part of the model; Megatron calls it for every model chunk."""
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


def load_batch(samples: Iterator[dict[str, Any]] | None) -> dict[str, torch.Tensor]:
    """Take the next micro-batch, which every pipeline stage needs for its attention mask.

    Args:
        samples: The data iterator; None but on tensor rank 0.

    Returns:
        Integers B x S, and ``is_random`` of B.
    """
    sample = next(samples) if samples is not None else None
    return dict(tensor_parallel.broadcast_data(list(_BATCH_KEYS), sample, torch.int64))


def masked_loss(
    batch: dict[str, torch.Tensor], output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss of the masked words, and that of the sentences' order.

    Args:
        batch: The micro-batch.
        output: The model's loss at every token, B x S, and its logits of the order, B x 2, if it has that
            head.

    Returns:
        Their sum, and each of them with its number of micro-batches, for Megatron's log.
    """
    token_loss, order_logits = output
    mask = batch["loss_mask"].reshape(-1).float()
    # A micro-batch of very short texts may have no masked word.
    words = torch.sum(token_loss.reshape(-1).float() * mask) / mask.sum().clamp(min=1)
    parts = {"lm loss": words}
    if order_logits is not None:
        parts["sop loss"] = cross_entropy(order_logits.view(-1, 2).float(), batch["is_random"].view(-1))
    for name, part in parts.items() if get_args().check_for_nan_in_loss_and_grad else ():
        for is_bad, what in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            get_rerun_state_machine().validate_result(
                result=part,
                rejection_func=is_bad,
                message=f"the {name} of a micro-batch is {what}",
                tolerance=0.0,
                fatal=True,
            )
    one = torch.ones_like(words)
    return sum(parts.values(), torch.zeros_like(words)), {
        name: torch.stack([part.detach(), one]) for name, part in parts.items()
    }


def forward_step(
    data_iterator: Iterator[dict[str, Any]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """Run the model on one micro-batch; Megatron's schedules call it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = load_batch(data_iterator)
    timers("batch-generator").stop()
    output = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"] if get_args().bert_binary_head else None,
        lm_labels=batch["labels"],
    )
    return output, partial(masked_loss, batch)


def dataset_config(args: Any) -> BERTMaskedWordPieceDatasetConfig:
    """Settings of the data, from Megatron's arguments; masking is that of Megatron-LM's script."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    # The words are all that masking needs; other types are Megatron's, which need the package transformers.
    is_file = args.tokenizer_type == "NullTokenizer"
    return BERTMaskedWordPieceDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=WordPieceTokenizer.load(Path(args.tokenizer_model)) if is_file else build_tokenizer(args),
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
    )


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build training, validation and test data, where this rank reads any.

    Args:
        num_samples: Samples needed of each.
        vp_stage: Model chunk under interleaved pipelining; all of them read.

    Returns:
        The three data sets.
    """

    def reads_data() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0

    builder = BlendedMegatronDatasetBuilder(
        BERTMaskedWordPieceDataset, num_samples, reads_data, dataset_config(get_args())
    )
    training, validation, test = builder.build()
    return training, validation, test


# Every rank asks for data sets, and the builder lets the ranks of a node share the indices.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Pretrain as the command line says."""
    args = parse_and_validate_args()
    for name in _UNSUPPORTED:
        if getattr(args, name, None):
            raise SystemExit(
                f"--{name.replace('_', '-')} is not served by this script, which trains Megatron's BERT"
            )
    for name, wanted in _ONLY.items():
        if (got := getattr(args, name)) not in wanted:
            raise SystemExit(
                f"--{name.replace('_', '-')}: got {got}, wanted {' or '.join(map(str, wanted))}, all that "
                "Megatron's BERT knows"
            )
    if args.tokenizer_type == "NullTokenizer" and args.tokenizer_model is None:
        raise SystemExit(
            "--tokenizer-type NullTokenizer: got no --tokenizer-model, wanted the folder that "
            "`megatron-fssdp data build --tokenizer wordpiece` wrote, or another tokenizer type"
        )
    pretrain(
        pretrain_cfg_container_from_args(args),
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        build_model,
    )


if __name__ == "__main__":
    main()
