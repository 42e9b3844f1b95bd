"""Modules of the base with adapters on them, and the Parameters that they hold."""
