"""Frozen, documented, validated settings; YAML in, JSON Schema out."""
