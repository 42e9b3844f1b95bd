"""A limit on memory: what a run and its tasks take, and what of them fits."""
