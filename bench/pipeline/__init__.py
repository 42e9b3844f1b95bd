"""Measures pipelines of several processes against those of others."""
