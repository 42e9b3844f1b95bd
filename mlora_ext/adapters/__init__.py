"""Kinds of adapters, and the configs that are supported."""
