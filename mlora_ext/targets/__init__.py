"""Which modules an adapter is put on; adding and removing adapters."""
