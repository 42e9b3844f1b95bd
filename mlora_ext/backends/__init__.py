"""Backends of the low-rank part: C++ on CPUs, Triton and CUDA on GPUs."""
