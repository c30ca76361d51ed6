"""Files that are written whole or not at all, locks on folders, and records in JSON."""
