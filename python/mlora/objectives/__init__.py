"""Objectives: the losses that adapters are trained for."""
