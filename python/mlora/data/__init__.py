"""Datasets: formats, samples, their order, and packing into rows."""
