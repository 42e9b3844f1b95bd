"""Benchmarks of out-of-core tuning."""
