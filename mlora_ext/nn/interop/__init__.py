"""Adapters of and for PEFT and Transformers: folders, models, the adapter interface."""
