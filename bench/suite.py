"""Measures operators and layers beside their peers, on a CPU or a CUDA GPU; `--help` says more."""

from microbench.command import main

if __name__ == "__main__":
    raise SystemExit(main())
