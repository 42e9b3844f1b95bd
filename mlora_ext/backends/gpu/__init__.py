"""Parts that the backends `triton` and `cuda` share: the plan, the factor tables, the order of launches.

docs/gpu.md describes every table and launch.
"""
