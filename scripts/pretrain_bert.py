"""Pretrains a BERT with Megatron's arguments; the script itself is part of the package."""

from megatron_fssdp.pretraining.pretrain_bert import main

if __name__ == "__main__":
    main()
