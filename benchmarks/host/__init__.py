"""What the host of a rank does for a layer: its waits and operators, and the seconds of its plans."""
