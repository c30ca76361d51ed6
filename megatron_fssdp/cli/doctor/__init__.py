"""The command ``doctor``, and its checks of a machine, which import torch and Megatron late."""
