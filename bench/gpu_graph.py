"""Compares a step captured as a CUDA graph with an eager one; `--help` says more."""

from gpu.graph import main

if __name__ == "__main__":
    raise SystemExit(main())
