"""Adapters on parameters of modules that are no linear layers: PEFT's `target_parameters`."""
