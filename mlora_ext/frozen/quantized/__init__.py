"""Frozen weights in fewer bits, one file for each family of formats."""
