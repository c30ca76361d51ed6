"""The ``fssdp`` strategy: its plans, their corrections after the gate, and its re-sharding."""
