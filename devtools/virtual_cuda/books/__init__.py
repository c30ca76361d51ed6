"""The virtual device: what each stream did in which order, who uses which memory, and what was found."""
