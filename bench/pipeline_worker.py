"""Runs one process of `bench_pipeline.py`, which starts it."""

from pipeline.worker import main

if __name__ == "__main__":
    raise SystemExit(main())
