"""The engine: its verbs, adapters' states, batches in flight, and the worker of one stage."""
