"""Optimizers, learning-rate schedules and the loss scaler."""
