"""Makes a tiny random Qwen3-MoE model with a tokenizer of bytes, and conversations to train it with."""

import json
import os
import random
import time

import torch

NUM_LAYERS, EXPERTS, TOP, HIDDEN, HEADS = 2, 8, 2, 32, 4
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda")


def model_and_data(folder):
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


def config_of(num_layers, vocab_size, num_groups, **rest):
    """The configuration of a tiny model in the Hugging Face format."""
    from transformers import Qwen3MoeConfig

    heads = {"num_attention_heads": HEADS, "num_key_value_heads": num_groups, "head_dim": HIDDEN // HEADS}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": TOP, "moe_intermediate_size": HIDDEN}
    sizes = {"vocab_size": vocab_size, "hidden_size": HIDDEN, "num_hidden_layers": num_layers}
    return Qwen3MoeConfig(**heads, **experts, **sizes, tie_word_embeddings=False, **rest)


def _save_model(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

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
    special = {"eos_token_id": names.index("<|im_end|>"), "pad_token_id": names.index("<|endoftext|>")}
    numbers = {"initializer_range": 0.08, "router_aux_loss_coef": 0.0, "norm_topk_prob": True}
    others = {"intermediate_size": 64, "max_position_embeddings": 512, "bos_token_id": None}
    config = config_of(NUM_LAYERS, 272, HEADS // 2, **special, **numbers, **others)
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[:2] += 0.15  # loads become uneven
    model.save_pretrained(folder)


def _save_conversations(file):
    drawn = random.Random(3)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(64):
            words = {"user": drawn.choices(_WORDS, k=6), "assistant": drawn.choices(_WORDS, k=8)}
            turns = [{"role": role, "content": " ".join(said)} for role, said in words.items()]
            rejected = " ".join(reversed(words["assistant"]))  # Only preferences are learned from it.
            lines.write(json.dumps({"messages": turns, "rejected_response": rejected}) + "\n")
