"""Lines of a dataset to tokens and labels, and their order."""
