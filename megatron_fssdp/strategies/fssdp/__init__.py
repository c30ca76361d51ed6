"""The ``fssdp`` strategy: its plans before the gate, and its re-sharding."""
