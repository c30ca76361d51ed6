"""Settings of a run: read from YAML, validated, and immutable."""
