"""Measures what the scheduler takes of a step, and how well it predicts memory."""
