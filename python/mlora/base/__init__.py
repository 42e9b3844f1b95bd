"""The frozen base model: where it is, how it is cut into stages, read and run, and its loss."""
