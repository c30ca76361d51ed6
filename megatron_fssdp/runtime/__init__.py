"""Carries out plans on tensors, without Megatron: materialization, dispatch, experts and combine."""
