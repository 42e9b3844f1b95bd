"""Checks of the GPU kernels: odd shapes for the sanitizer, machine code, overlap of copies and kernels."""
