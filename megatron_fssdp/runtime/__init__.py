"""Executes decisions on tensors: slots, materialization, dispatch, grouped expert FFN."""
