"""Adapters on a mixture's experts."""
