"""Makes a tiny random Qwen3-MoE model with a tokenizer of bytes, and conversations to train it with."""

import json
import os
import random
import time
from pathlib import Path

import torch

NUM_LAYERS, NUM_EXPERTS, TOP, HIDDEN, HEADS = 2, 8, 2, 32, 4
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda")


def model_and_data(folder: Path) -> tuple[Path, Path]:
    """Return the folder of the model and the file of conversations, which rank 0 makes."""
    made = folder / "tiny_qwen"
    if os.environ.get("RANK", "0") == "0" and not made.is_dir():
        unfinished = folder / "tiny_qwen.unfinished"
        unfinished.mkdir(parents=True)
        _save_model(unfinished)
        _save_conversations(unfinished / "conversations.jsonl")
        unfinished.rename(made)
    end = time.monotonic() + 120
    while not made.is_dir():
        assert time.monotonic() < end, f"rank 0 has not made {made}"
        time.sleep(0.1)
    return made, made / "conversations.jsonl"


def _save_model(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIAL]
    tokens = Tokenizer(models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(_SPECIAL)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, additional_special_tokens=_SPECIAL, chat_template=_TEMPLATE, **ends
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    sizes = {"vocab_size": 272, "hidden_size": HIDDEN, "intermediate_size": 64, "head_dim": HIDDEN // HEADS}
    sizes |= {
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
    }
    sizes |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP, "moe_intermediate_size": HIDDEN}
    numbers = {"initializer_range": 0.08, "router_aux_loss_coef": 0.0, "norm_topk_prob": True}
    special = {"eos_token_id": names.index("<|im_end|>"), "pad_token_id": names.index("<|endoftext|>")}
    config = Qwen3MoeConfig(
        **sizes,
        **numbers,
        **special,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[:2] += 0.15  # loads become uneven
    model.save_pretrained(folder)


def _save_conversations(file: Path) -> None:
    drawn = random.Random(3)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(64):
            words = {"user": drawn.choices(_WORDS, k=6), "assistant": drawn.choices(_WORDS, k=8)}
            turns = [{"role": role, "content": " ".join(said)} for role, said in words.items()]
            lines.write(json.dumps({"messages": turns}) + "\n")
