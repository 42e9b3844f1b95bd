"""A run on disk: its folder, checkpoints and state files, the queue of requests, and the log of events."""
