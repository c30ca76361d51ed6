"""Measurements of the host: what it does in a layer, how long planners take, and the posting of messages."""
