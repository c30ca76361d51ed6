"""Pretrains a GPT with Megatron's arguments; the script itself is part of the package."""

from megatron_fssdp.pretraining.pretrain_gpt import main

if __name__ == "__main__":
    main()
