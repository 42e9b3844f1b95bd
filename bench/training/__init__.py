"""Measures whole training runs and sweeps against PEFT."""
