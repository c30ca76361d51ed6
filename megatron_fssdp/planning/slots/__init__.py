"""Which expert is in which numbered slot of a device, and to which slot a source sends its tokens."""
