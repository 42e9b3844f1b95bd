"""Users' requests to a run, and what the run publishes for them."""
