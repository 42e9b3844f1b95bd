"""Trackers: a run's values in TensorBoard, Weights & Biases, MLflow and Trackio."""
