"""Settings of a run: read from YAML, validated, immutable, and described by a JSON Schema."""
