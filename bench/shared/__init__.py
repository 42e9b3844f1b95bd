"""What several benchmarks use: the machine, timing, counting, model shapes, results."""
