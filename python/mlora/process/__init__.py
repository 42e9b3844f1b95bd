"""The processes that a run runs in: how they start, what each has of the device and the model."""
