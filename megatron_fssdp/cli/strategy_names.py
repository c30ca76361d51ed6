"""The names of strategies for help texts, which do not import the registry, because that takes long."""

SHIPPED_NAMES = "none, ep, fssdp, fastermoe, prophet, quota, smartmoe, flexmoe, parm, auto"
"""Strategies that come with the package."""
