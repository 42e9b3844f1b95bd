"""Turns a model into one with adapters, and hooks its calls."""
